// ---- building the page ----

// The controls of the network in front.
function buildFront() {
  buildCapsules();
  buildSliders();
  buildIterations();
}

function showNames() {
  $(".network").textContent = networks.map(({ name, what }) => (what ? `${name}: ${what}` : name)).join(" · ");
}

function build() {
  showNames();
  buildFront();
  buildImage();
  buildRouting();
  buildCells();
  buildBeside();
  for (const button of element.querySelectorAll("[data-do]"))
    button.addEventListener("click", safely(ACTIONS[button.dataset.do]));
  $("[name=overlay]").addEventListener("change", paintWhole);
  $("[name=pin]").addEventListener("change", ({ target }) => (state.pinned = target.checked));
  window.addEventListener("hashchange", restore);
}

build();
setImage({ pixels: null });
buildLearning();
if (location.hash.length > 1) restore();
else openAlive();
