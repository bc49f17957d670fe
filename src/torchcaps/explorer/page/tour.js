// ---- a tour of four steps at the first visit, and a moving digit when the page opens ----
import { ACTIONS } from "./actions.js";
import { $, about, learning, make, networks, safely, state } from "./core.js";
import { setImage, testImage } from "./image.js";
import { stopSweep, sweep } from "./pose.js";

const TOUR = [
  [".capsules", "1. Length", "Each class has a capsule, a small vector. Its length says how sure the network is that the class is there."],
  [".components", "2. Pose", "The components of the longest capsule describe the digit: its slant, its size, the width of its strokes. Move one."],
  [".decoded", "3. Reconstruction", "The decoder draws this image from the longest capsule alone. Missing details are not encoded in the capsule."],
  [".routing", "4. Agreement", "Small capsules of the image vote for the classes. In each iteration the votes that agree count for more. Press Play."],
];
const TASKS = [
  "Draw a 4, then close its top: at which stroke does it become a 9?",
  "Draw two digits over each other: does a second capsule grow?",
  "Fool the network: draw something that is no digit and get a confident answer.",
];
const FIRST_IMAGE = 4; // test image when the page opens

let stop = 0; // step of the tour; the tasks follow its last step

function showTour() {
  const isOver = stop === TOUR.length, [where, title, words] = isOver ? [".image", "Now try", ""] : TOUR[stop];
  const tour = $(".tour"), panel = $(where);
  unmark();
  panel.classList.add("toured");
  $(".tour strong").textContent = title;
  $(".tour p").textContent = words;
  $(".tour ol").replaceChildren(...(isOver ? TASKS : []).map((task) => make("li", task)));
  $("[data-do=next]").textContent = isOver ? "Done" : "Next";
  $("[data-do=skip]").hidden = isOver;
  tour.hidden = false;
  panel.scrollIntoView();
  tour.classList.toggle("above", panel.getBoundingClientRect().top > tour.offsetHeight + 20); // place it where it does not cover the panel
}

function unmark() {
  $(".toured")?.classList.remove("toured");
}

function endTour() {
  if (!isTourSeen()) sweepLargest();
  unmark();
  $(".tour").hidden = true;
  try {
    localStorage.setItem("torchcaps-tour", "seen");
  } catch {} // a browser without storage shows the tour again
}

// Sweeps the largest component of the capsule once, without being asked.
function sweepLargest() {
  if (!state.pose || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const sizes = state.pose.map(Math.abs);
  sweep(sizes.indexOf(Math.max(...sizes)));
}

function isTourSeen() {
  try {
    return localStorage.getItem("torchcaps-tour") === "seen";
  } catch {
    return false;
  }
}

Object.assign(ACTIONS, {
  tour() {
    stopSweep();
    stop = 0;
    showTour();
  },
  next() {
    if (stop++ < TOUR.length) showTour();
    else endTour();
  },
  skip: endTour,
});

// Shows a test image and the tour; after the tour, the capsule's largest component is swept once.
export const openAlive = safely(async () => {
  if (learning) return;
  if (networks[0].images) await setImage(await testImage(Math.min(FIRST_IMAGE, networks[0].images - 1)));
  if (about.noPose) return;
  if (isTourSeen() || about.noRouting) sweepLargest();
  else showTour();
});
