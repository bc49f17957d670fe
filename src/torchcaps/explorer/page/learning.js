// ---- learning: show a training ----
import { look } from "./answers.js";
import { ask } from "./ask.js";
import {
  $, about, classed, decodeBytes, element, height, latest, learning, make, paint, picture, short, showNames, state,
  track, width,
} from "./core.js";
import { isMoved } from "./pose.js";

const POLL_INTERVAL = 700; // milliseconds between two questions

const showLearning = latest(async () => {
  const now = await ask("progress", {});
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  $(".learning .says").textContent = now.says;
  about.what = now.what;
  showNames();
  $(".learning .epoch").textContent = `epoch ${now.epoch} of ${now.epochs}, step ${now.step} of ${now.steps}`;
  $(".learning .accuracy").textContent = now.accuracy.length ? percent(now.accuracy.at(-1)[1]) : "–";
  $(".learning .loss").textContent = now.loss.length ? now.loss.at(-1)[1].toFixed(3) : "–";
  drawCurves(now);
  element.querySelectorAll(".pupil").forEach((figure, n) => {
    if (now.decoded) paint(figure.querySelector(".drawn"), decodeBytes(now.decoded[n]));
    figure.querySelector(".track").style.setProperty("--share", Math.min(now.scores[n], 1));
    figure.classList.toggle("present", now.right[n]);
    figure.querySelector("figcaption").textContent = `${now.seen[n]}${now.right[n] ? "" : " ✗"} ${short(now.scores[n])}`;
  });
  if (state.view && !isMoved()) await look(); // answer the drawn image by the network's present weights
  if (now.isRunning) setTimeout(showLearning, POLL_INTERVAL);
});

// Draws accuracy (0 to 1) and loss (relative to its maximum) against the steps, and the numbers at the axes.
function drawCurves({ steps, loss, accuracy }) {
  const most = Math.max(...loss.map(([, value]) => value), 1e-9);
  const number = (axis, texts) => $(axis).replaceChildren(...texts.map((text) => make("span", text)));
  number(".losses", loss.length ? [most, most / 2, 0].map((value) => value.toFixed(2)) : []);
  number(".steps", ["0", `${steps} steps`]);
  const line = (points, top) => points.map(([step, value]) => `${(300 * step) / steps},${100 - (96 * value) / top}`).join(" ");
  $(".learning .lossline").setAttribute("points", line(loss, most));
  $(".learning .accuracyline").setAttribute("points", line(accuracy, 1));
  const dots = accuracy.map(([step, value]) => `M${(300 * step) / steps},${100 - 96 * value}h0`);
  $(".learning .dots").setAttribute("d", dots.join(""));
}

export function buildLearning() {
  $(".learning").hidden = !learning;
  if (!learning) return;
  $(".learning .measure").textContent = about.components ? `${about.score} of the right capsule` : `${about.score} of the right class`;
  $(".pupils").replaceChildren(...learning.images.map((bytes, n) => {
    const image = picture(`Image of ${learning.labels[n]}`, (canvas) => paint(canvas, decodeBytes(bytes)));
    const drawn = picture(`Its reconstruction`, (canvas) => classed("drawn", paint(canvas, new Uint8Array(height * width))));
    return classed("pupil", make("figure", image, drawn, track(0), make("figcaption")));
  }));
  showLearning();
}
