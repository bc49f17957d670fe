// ---- the buttons ----
import { decode } from "./answers.js";
import { $, height, ink, networks, state, width } from "./core.js";
import { pick, remember, setImage, takeDrawing, undo } from "./image.js";
import { showSliders, stopSweep, takePose } from "./pose.js";
import { play } from "./routing.js";
import { download, link } from "./sharing.js";

export const ACTIONS = {
  clear() {
    if (state.pixels) remember();
    history.replaceState(null, "", location.pathname + location.search);
    return setImage({ pixels: null });
  },
  undo,
  reset() {
    stopSweep();
    takePose();
    showSliders();
    decode();
  },
  invert() {
    remember();
    Object.assign(ink, { globalCompositeOperation: "difference", fillStyle: "white" });
    ink.fillRect(0, 0, width, height);
    ink.globalCompositeOperation = "source-over";
    return takeDrawing();
  },
  random() {
    return pick(Math.floor(Math.random() * networks[0].images));
  },
  async copy() {
    history.replaceState(null, "", link());
    const button = $("[data-do=copy]");
    try {
      await navigator.clipboard.writeText(location.href);
      button.textContent = "Link copied";
    } catch {
      button.textContent = "Link is in the address bar";
    }
    setTimeout(() => (button.textContent = "Copy link"), 2000);
  },
  download,
  play,
};
