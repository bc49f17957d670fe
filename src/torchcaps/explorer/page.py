"""The page: one custom component of Gradio, which brings the browser's questions to the explorer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps.errors import InputError
from torchcaps.explorer.messages import answers, describe
from torchcaps.explorer.state import Explorer

if TYPE_CHECKING:
    from fastapi import FastAPI

_FOLDER = Path(__file__).parent
# What the browser may load and whom it may talk to: this server. Gradio's own scripts need the two "unsafe".
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; base-uri 'self'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'"
)


def make_app(explorer: Explorer) -> FastAPI:
    """The page as a web application.

    It answers only requests for this machine by its own name, so that no other site can have its name point here, and
    forbids the browser to load anything from elsewhere.

    Args:
        explorer: What is explored.

    Raises:
        InputError: Gradio is not installed.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    try:
        import gradio
        from fastapi import FastAPI, Request, Response
        from starlette.middleware.base import RequestResponseEndpoint
        from starlette.middleware.trustedhost import TrustedHostMiddleware
    except ModuleNotFoundError as error:
        raise InputError(
            f"the explorer needs {error.name}, which is not installed; pip install 'torchcaps[explore]'"
        ) from None

    background = {"body_background_fill": "#f5f5f2", "body_background_fill_dark": "#121215"}
    # plain names are fonts of the reader's own system; others would be fetched, from Google too
    theme = gradio.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    with gradio.Blocks(title="torchcaps explorer", analytics_enabled=False, fill_width=True) as page:
        gradio.HTML(
            html_template=_read("page.html"),
            js_on_load=_read("page.js"),
            apply_default_css=False,
            server_functions=answers(explorer),
            about=describe(explorer),
        )
    app = FastAPI(openapi_url=None)  # its documentation pages load scripts from elsewhere

    @app.middleware("http")
    async def add_policy(request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        response.headers["Content-Security-Policy"] = _POLICY
        return response

    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return gradio.mount_gradio_app(
        app,
        page,
        path="/",
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        theme=theme.set(**background),
        head=f"<style>\n{_read('page.css')}</style>",
    )


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
