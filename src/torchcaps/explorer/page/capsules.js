// ---- capsules: answer of the network in front, choice of the capsule to decode ----
import { decode } from "./answers.js";
import { showBeside } from "./beside.js";
import { $, about, classed, colour, element, height, make, page, paint, scoreWords, state, whole, width } from "./core.js";
import { showSliders, stopSweep, takePose } from "./pose.js";
import { showRouting } from "./routing.js";

export const MAX_BARS = 20; // with more classes, the longest capsules and the chosen one are listed

export const ownClass = () => state.chosen ?? state.view.present[0];

// Classes to decode: the predicted ones; a chosen class that is not among them replaces the last.
export function decodedClasses() {
  const { present } = state.view, own = ownClass();
  return present.includes(own) ? present : [...present.slice(0, -1), own];
}

export const capsuleWords = (classes) => about.slots ? "all slots" :
  (classes.length > 1 ? "capsules " : "capsule ") + classes.map((j) => about.classes[j]).join(" and ");

export function verdict({ present, caveats }, { classes, slots }) {
  if (slots) return ["The network has redrawn the image from ", make("strong", `${classes.length} slots`), "."];
  const names = make("strong", present.map((j) => classes[j]).join(" and "));
  return caveats.length ? ["Most likely ", names, ", but the network is not sure."] : ["The network sees ", names, "."];
}

// A screen reader reads every change of the verdict aloud, so an equal verdict is not written again.
function showVerdict(...parts) {
  if (make("p", ...parts).textContent !== $(".verdict").textContent) $(".verdict").replaceChildren(...parts);
}

export function showNothing() {
  Object.assign(state, { views: [], view: null, pose: null, decoded: null });
  showVerdict("Draw, upload or pick an image.");
  $(".caveats").textContent = "";
  showBars(about.classes.map(() => 0), []);
  paint(whole, new Uint8Array(height * width));
  whole.setAttribute("aria-label", "No reconstruction yet");
  $(".apart").replaceChildren();
  showRouting();
  showBeside();
  showSliders();
}

export function showView() {
  showVerdict(...verdict(state.view, about));
  const why = state.view.caveats.join("; ");
  $(".caveats").textContent = why && `${why[0].toUpperCase()}${why.slice(1)}.`;
  showBars(state.view.scores, state.view.present);
  showSliders();
  showRouting();
  showBeside();
  decode();
}

function showBars(scores, present) {
  const ranked = scores.map((_, j) => j).sort((a, b) => scores[b] - scores[a]);
  const listed = new Set([...ranked.slice(0, MAX_BARS), state.chosen]);
  for (const row of element.querySelectorAll(".bar[data-class]")) {
    const j = Number(row.dataset.class), n = present.indexOf(j);
    row.hidden = !listed.has(j);
    row.classList.toggle("present", n >= 0);
    row.style.setProperty("--share", Math.min(scores[j], 1));
    row.style.setProperty("--own", about.objects > 1 && n >= 0 ? colour(n, j) : "");
    row.querySelector(".number").textContent = scores[j].toFixed(2);
    row.querySelector("input").setAttribute("aria-label", `${about.classes[j]}, ${about.score} ${scores[j].toFixed(2)}`);
  }
}

export function choose(j) {
  state.chosen = j;
  const row = element.querySelector(`[name=capsule][value="${j ?? "longest"}"]`);
  row.checked = true;
  if (j === null) $("[name=pin]").checked = state.pinned = false;
  $("[name=pin]").disabled = j === null;
}

function chooseAndShow(j) {
  stopSweep();
  choose(j);
  if (!state.view) return;
  takePose();
  showBars(state.view.scores, state.view.present);
  showSliders();
  decode();
}

export function buildCapsules() {
  const words = scoreWords(about);
  $(".bars legend").textContent = `${words[0].toUpperCase()}${words.slice(1)}${about.noPose ? "" : `; choose the one to ${about.slots ? "change" : "decode"}`}`;
  $("#capsules-heading").textContent = about.slots ? "Slots" : about.components ? "Capsules" : "Classes";
  page.classList.toggle("of-slots", about.slots);
  const rows = [null, ...about.classes.keys()].map((j) => {
    const radio = document.createElement("input"), row = classed("bar", make("label", radio));
    Object.assign(radio, { type: "radio", name: "capsule", value: j ?? "longest", checked: j === state.chosen });
    radio.disabled = Boolean(about.noPose);
    radio.addEventListener("change", () => chooseAndShow(j));
    row.append(make("span", j === null ? `the ${about.highest}` : about.classes[j]));
    if (j !== null) {
      row.dataset.class = j;
      row.append(classed("track", make("span")), classed("number", make("span", "0.00")));
    }
    return row;
  });
  element.querySelectorAll(".bar").forEach((row) => row.remove());
  $(".bars").append(...rows);
  $(".pin").hidden = Boolean(about.noPose);
  choose(about.noPose ? null : state.chosen);
}
