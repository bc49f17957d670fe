from .server import serving as serving
from .state import Explorer as Explorer
from .state import View as View
from .state import open_explorer as open_explorer
from .static import write_page as write_page
