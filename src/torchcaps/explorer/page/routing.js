// ---- routing: maps of the coupling on the grid of the input capsules, in each iteration ----
import { look } from "./answers.js";
import { drawVotes, showVotes } from "./cells.js";
import {
  $, about, classed, decodeBytes, element, lack, make, page, paintPixels, picture, short, state, track,
} from "./core.js";

const ITERATION_TIME = 1000; // milliseconds from one iteration to the next
let playing = null; // timer of the animation; null if it is stopped

// Returns red, green and blue of a CSS variable in the present theme.
function themeColour(name) {
  const probe = make("span");
  probe.style.color = `var(${name})`;
  page.append(probe);
  const found = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  return found;
}

// Levels −1..1 are signed square roots of the difference from uniform coupling ÷ reach, so that small differences are visible.
function paintLevels(canvas, h, w, level) {
  const [below, uniform, above] = ["--below", "--uniform", "--above"].map(colourOf);
  return paintPixels(canvas, h, w, (i, c) => {
    const share = level(i), towards = share < 0 ? below : above;
    return uniform[c] + Math.abs(share) * (towards[c] - uniform[c]);
  });
}

let colours = {};
const colourOf = (name) => (colours[name] ??= themeColour(name));

const levelsOf = (text) => Float32Array.from(decodeBytes(text), (byte) => (byte - 128) / 127);

export function showRouting() {
  clearInterval(playing);
  playing = null;
  const routing = state.view?.routing;
  $(".routing .shown").hidden = !routing;
  showVotes();
  if (!routing) {
    $(".routing .what").textContent = lack("noRouting") ?? "Draw, upload or pick an image to see how each class couples to the input capsules.";
    return;
  }
  const place = routing.inSpace ? `on the grid of the ${routing.inputs}` : `of the ${routing.inputs} in the order of their index, not in space`;
  $(".routing .what").textContent = `Coupling ${place}; below each map, the capsule's ${about.score}.`
    + (state.iterations ? ` The network was trained with ${about.iterations} iteration${about.iterations > 1 ? "s" : ""}.` : "");
  state.maps = routing.maps.map((row) => row.map(levelsOf));
  $(".maps").replaceChildren(...routing.classes.map((j) => {
    const map = classed("map", make("div", picture("", (canvas) => canvas)));
    const made = make("figure", map, track(0), make("figcaption", about.classes[j], make("span")));
    made.classList.toggle("present", state.view.present.includes(j));
    return made;
  }));
  const last = routing.maps.length, control = $("[name=iteration]");
  Object.assign(control, { min: 1, max: last, value: last });
  $(".played").hidden = last < 2;
  showLegend(routing);
  showIteration(last);
}

// Shows maps and scores at iteration t; between two iterations they are interpolated.
function showIteration(t) {
  const { routing } = state.view, [h, w] = routing.size;
  const low = Math.floor(t) - 1, high = Math.min(low + 1, routing.maps.length - 1), part = t - 1 - low;
  const mixed = (a, b) => a + part * (b - a);
  element.querySelectorAll(".maps figure").forEach((figure, n) => {
    const [a, b] = [state.maps[low][n], state.maps[high][n]], canvas = figure.querySelector("canvas");
    paintLevels(canvas, h, w, (i) => mixed(a[i], b[i]));
    canvas.setAttribute("aria-label", `${about.classes[routing.classes[n]]}, mean coupling ${Number(routing.means[low][n]).toFixed(3)}`);
    const score = mixed(routing.scores[low][n], routing.scores[high][n]);
    figure.querySelector(".track").style.setProperty("--share", Math.min(score, 1));
    figure.querySelector("span:last-child").textContent = short(score);
  });
  $(".largest").textContent = largestWords(routing, Math.round(t) - 1);
  const place = `iteration ${Math.round(t)} of ${routing.maps.length}`;
  $(".transport output").textContent = place;
  $("[name=iteration]").setAttribute("aria-valuetext", place);
  drawVotes(Math.round(t) - 1);
}

export function play() {
  const last = state.view.routing.maps.length, start = performance.now();
  clearInterval(playing);
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const mine = setInterval(() => {
    const passed = (performance.now() - start) / ITERATION_TIME - 0.5; // hold the first iteration for half a second
    const done = Math.floor(passed), part = still ? 0 : Math.min(2 * (passed - done), 1); // hold every iteration, then move to the next
    const t = Math.max(1, Math.min(1 + done + part, last));
    $("[name=iteration]").value = t;
    showIteration(t);
    if (passed >= last - 1) clearInterval(mine);
  }, 40);
  playing = mine;
  $("[name=iteration]").value = 1;
  showIteration(1);
}

// Returns the largest coupling in the maps of an iteration in words, as analysis.trace.compare_to_uniform.
function largestWords({ largest, uniform }, t) {
  const ratio = largest[t] / uniform, away = Math.abs(ratio - 1), side = ratio > 1 ? "above" : "below";
  const words = away < 0.005 ? "uniform" : ratio >= 1.995 ? `${ratio.toFixed(1)} times uniform` : `${Math.round(100 * away)} % ${side} uniform`;
  return `Largest here ${largest[t].toFixed(3)}, ${words}.`;
}

// The scale depends on the layer alone, so the maps of all images can be compared. It goes from 0 to uniform + reach.
function showLegend({ uniform, reach }) {
  const steps = 120, high = uniform + reach, three = (x) => Number(x.toFixed(3));
  $(".legend .low").textContent = "0";
  $(".legend .high").textContent = high < 1 ? `≥ ${three(high)}` : three(high);
  $(".legend .uniform").textContent = `uniform ${three(uniform)}`;
  paintLevels($(".legend canvas"), 1, steps, (i) => {
    const away = (high * (i + 0.5)) / steps - uniform;
    return Math.sign(away) * Math.sqrt(Math.abs(away) / reach);
  });
  $(".legend").style.setProperty("--at", uniform / high);
}

// ---- number of iterations ----

const MAX_ITERATIONS = 5; // choices, or more if the network has more

// Sets the number of iterations; 0, or a number that is no choice, selects the network's own number.
export function routeIn(iterations) {
  const control = $("[name=iterations]"), own = about.iterations;
  control.value = iterations;
  if (control.selectedIndex < 0) control.value = own;
  state.iterations = Number(control.value) === own ? 0 : Number(control.value);
}

export function buildIterations() {
  const own = about.iterations, most = Math.max(own, MAX_ITERATIONS);
  $("[name=iterations]").replaceChildren(...Array.from({ length: own ? most : 0 }, (_, n) => new Option(n + 1)));
  $(".iterations").hidden = !own;
  routeIn(0);
}

export function buildRouting() {
  $("[name=iterations]").addEventListener("change", ({ target }) => {
    routeIn(target.value);
    look();
  });
  $("[name=iteration]").addEventListener("input", ({ target }) => {
    clearInterval(playing);
    showIteration(Number(target.value));
  });
  const repaint = () => {
    colours = {};
    if (state.view?.routing) showRouting();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
}
