// ---- building the page ----
import { ACTIONS } from "./actions.js";
import { buildBeside, buildFront } from "./beside.js";
import { buildCells } from "./cells.js";
import { $, element, safely, showNames, state } from "./core.js";
import { buildImage, setImage } from "./image.js";
import { paintWhole } from "./pose.js";
import { buildRouting } from "./routing.js";
import { keep, restore } from "./sharing.js";
import { openAlive } from "./tour.js";

function build() {
  $(".waiting").remove();
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
  window.addEventListener("hashchange", () => restore());
  window.addEventListener("pagehide", keep);
}

build();
setImage({ pixels: null });
if (location.hash.length > 1) restore();
else openAlive();
