// ---- two networks side by side: both answers to the same image ----
import { look } from "./answers.js";
import { buildCapsules, MAX_BARS, showNothing, showView, verdict } from "./capsules.js";
import {
  $, classed, decodeBytes, element, make, networks, paint, picture, scoreWords, setAbout, state, track,
} from "./core.js";
import { buildSliders, stopSweep, takePose } from "./pose.js";
import { buildIterations } from "./routing.js";

export function showBeside() {
  if (networks.length < 2) return;
  element.querySelectorAll(".beside .answer").forEach((answer, n) => showAnswer(answer, networks[n], state.views[n]));
}

function showAnswer(answer, network, view) {
  answer.querySelector(".said").replaceChildren(...(view ? verdict(view, network) : ["No image yet."]));
  const ranked = view ? view.scores.map((_, j) => j).sort((a, b) => view.scores[b] - view.scores[a]) : [];
  const listed = ranked.slice(0, MAX_BARS).sort((a, b) => a - b);
  answer.querySelector(".thin").replaceChildren(...listed.map((j) => {
    const score = view.scores[j].toFixed(2);
    const row = make("div", make("span", network.classes[j]), track(view.scores[j]), make("span", score));
    row.classList.toggle("present", view.present.includes(j));
    return row;
  }));
  const shown = view?.decoded
    ? picture(`Reconstruction of ${network.name}`, (canvas) => paint(canvas, decodeBytes(view.decoded.whole)))
    : classed("hint", make("p", view ? "This network has no decoder." : ""));
  answer.querySelector(".drawn").replaceChildren(shown);
}

// Builds the controls of the network in front.
export function buildFront() {
  buildCapsules();
  buildSliders();
  buildIterations();
}

function putInFront(n) {
  stopSweep();
  setAbout(networks[n]);
  const wasRouted = state.iterations;
  state.cell = null;
  buildFront();
  if (!state.views.length) return showNothing();
  state.pose = null;
  if (wasRouted) return look(); // the other network answered with another number of iterations
  state.view = state.views[n];
  takePose();
  showView();
}

export function buildBeside() {
  $(".beside").hidden = networks.length < 2;
  if (networks.length < 2) return;
  $(".beside .columns").replaceChildren(...networks.map((network, n) => {
    const radio = Object.assign(document.createElement("input"), { type: "radio", name: "front", value: n, checked: !n });
    radio.addEventListener("change", () => putInFront(n));
    const name = make("label", radio, make("strong", network.name));
    name.title = "Show its capsules, components and routing in the other panels";
    const parts = [classed("hint", make("p", network.what)), classed("said", make("p")), classed("drawn", make("div"))];
    const scores = make("div", classed("hint", make("p", scoreWords(network))), classed("thin", make("div")));
    return classed("answer", make("div", name, ...parts, scores));
  }));
}
