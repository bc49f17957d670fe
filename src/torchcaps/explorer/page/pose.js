// ---- reconstruction and components: decode, change and sweep a capsule ----
import { decode } from "./answers.js";
import { capsuleWords, decodedClasses, ownClass } from "./capsules.js";
import {
  $, about, classed, element, height, lack, make, paint, paintPixels, say, signed, state, whole, width,
} from "./core.js";

// Sets the sliders to the image's capsule, or to the capsule from a link.
export function takePose(linkedPose = null) {
  if (!state.view.capsules) return;
  state.pose = [...state.view.capsules[ownClass()]];
  if (!linkedPose) return;
  if (linkedPose.length === state.pose.length) state.pose = linkedPose;
  else say(`The link has ${linkedPose.length} components, but a capsule of this network has ${state.pose.length}.`);
}

const capsuleName = () => `${about.slots ? "" : "capsule "}${about.classes[ownClass()]}`;

export const isMoved = () =>
  Boolean(state.pose?.some((value, k) => value !== state.view.capsules[ownClass()][k]));

export function showSliders() {
  const { pose, view } = state, own = pose && view.capsules[ownClass()];
  const largest = pose ? Math.max(...pose.map(Math.abs), ...own.map(Math.abs)) : 0;
  const reach = Math.max(0.5, Math.ceil(largest * 10) / 10); // most components are within ±0.5, all within ±1
  $("#components-heading").textContent = pose ? `Components of ${capsuleName()}` : "Components";
  element.querySelectorAll(".slider").forEach((row, k) => {
    const slider = row.querySelector("input");
    Object.assign(slider, { min: -reach, max: reach, disabled: !pose, value: pose ? pose[k] : 0 });
    row.querySelector("button").disabled = !pose;
    row.style.setProperty("--mark", pose ? (own[k] + reach) / (2 * reach) : 0.5);
    showValue(row, pose?.[k]);
  });
  showDecoded();
}

function showValue(row, value) {
  const slider = row.querySelector("input");
  row.querySelector("output").textContent = value === undefined ? "" : signed(value);
  slider.setAttribute("aria-valuetext", value === undefined ? "none" : signed(value));
  slider.style.setProperty("--at", (Number(slider.value) - slider.min) / (slider.max - slider.min));
}

function showDecoded() {
  const shown = state.pose && !about.noPose;
  for (const name of ["copy", "download"]) $(`[data-do=${name}]`).disabled = !state.view;
  $("[data-do=reset]").disabled = !shown || !isMoved();
  $(".source").textContent = shown ? `${sourceWords()}.${lengthNote()}` : "";
}

function sourceWords() {
  const length = Math.hypot(...state.pose).toFixed(2);
  const whose = about.objects > 1 ? `${capsuleName()} has` : "its";
  const changed = sweeping ? `, component ${sweeping.k} sweeping` : isMoved() ? ", changed by the sliders" : "";
  return `From ${capsuleWords(decodedClasses())}; ${whose} length ${length}${changed}`;
}

// The squash makes every capsule shorter than 1, but sliders can make it longer.
function lengthNote() {
  const own = Math.hypot(...state.view.capsules[ownClass()]);
  const beyond = about.score === "length" && own <= 1 && Math.hypot(...state.pose) > 1;
  return beyond ? " The squash keeps capsules shorter than 1, so no image gives this capsule." : "";
}

// Paints the reconstruction; with the overlay, the image has the first object's colour and the reconstruction the second's.
export function paintWhole() {
  if (!state.decoded || !$("[name=overlay]").checked) return void (state.decoded && paint(whole, state.decoded));
  const size = height * width, colours = about.colours.map((text) => text.match(/\d+/g).map(Number));
  const brightest = (bytes, i) => {
    let most = 0;
    for (let n = i; n < bytes.length; n += size) most = Math.max(most, bytes[n]);
    return most / 255;
  };
  const pair = [state.pixels, state.decoded];
  paintPixels(whole, height, width, (i, c) => pair.reduce((sum, bytes, n) => sum + colours[n][c] * brightest(bytes, i), 0));
}

function moveSlider(k, value) {
  state.pose[k] = value;
  showValue(element.querySelectorAll(".slider")[k], value);
  showDecoded();
  decode();
}

// ---- sweep: move one component through its range and back ----

const SWEEP_TIME = 4000; // milliseconds
let sweeping = null; // the swept component, its value before, and its row

export function stopSweep() {
  if (!sweeping) return;
  const { k, from, row } = sweeping;
  sweeping = null;
  row.classList.remove("sweeping");
  row.querySelector("button").setAttribute("aria-pressed", "false");
  if (state.pose) setSlider(k, from);
}

function setSlider(k, value) {
  element.querySelectorAll(".slider input")[k].value = value;
  moveSlider(k, value);
}

export function sweep(k) {
  const again = sweeping?.k !== k;
  stopSweep();
  if (!again) return;
  const row = element.querySelectorAll(".slider")[k], reach = Number(row.querySelector("input").max);
  const from = state.pose[k], mine = { k, from, row }, start = performance.now();
  sweeping = mine;
  row.classList.add("sweeping");
  row.querySelector("button").setAttribute("aria-pressed", "true");
  const first = Math.asin(Math.max(-1, Math.min(1, from / reach))); // a sine that starts at the component's value
  const step = (now) => {
    if (sweeping !== mine) return;
    const share = (now - start) / SWEEP_TIME;
    if (share >= 1) return stopSweep();
    setSlider(k, reach * Math.sin(first + 2 * Math.PI * Math.max(share, 0)));
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}

export function buildSliders() {
  const count = about.noPose ? 0 : about.components;
  $(".sliders").replaceChildren(...Array.from({ length: count }, (_, k) => {
    const button = make("button", String(k)), slider = document.createElement("input"), output = make("output");
    Object.assign(button, { type: "button", title: `Sweep component ${k} through its range` });
    button.setAttribute("aria-label", `Sweep component ${k}`);
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => sweep(k));
    Object.assign(slider, { type: "range", step: "any", id: `component-${k}` });
    slider.setAttribute("aria-label", `Component ${k}`);
    output.htmlFor = slider.id;
    slider.addEventListener("input", () => {
      const value = Number(slider.value);
      if (sweeping?.k === k) sweeping.from = value;
      stopSweep();
      moveSlider(k, value);
    });
    return classed("slider", make("div", button, slider, output));
  }));
  $("#components-help").textContent =
    lack("noPose") ?? "Move a slider to see its effect, or press its number to sweep it. The mark below a slider is the image's value.";
  whole.hidden = $(".overlay").hidden = Boolean(about.noPose);
}
