// ---- a tour of five steps at the first visit, and a moving digit when the page opens ----
import { ACTIONS } from "./actions.js";
import { $, about, element, make, networks, safely, state } from "./core.js";
import { setImage, testImage } from "./image.js";
import { stopSweep, sweep } from "./pose.js";
import { kept, restore } from "./sharing.js";

const TOUR = [
  [".image", "1. Image", "The network sees this image, which was never used for its training. Later, draw one of your own."],
  [".capsules", "2. Length", "Each class has a capsule, a small vector. Its length says how sure the network is that the class is there."],
  [".components", "3. Pose", "The components of the longest capsule describe the digit: its slant, its size, the width of its strokes. Move one."],
  [".decoded", "4. Reconstruction", "The decoder draws this image from the longest capsule alone. Missing details are not encoded in the capsule."],
  [".routing", "5. Agreement", "Small capsules of the image vote for the classes. In each iteration the votes that agree count for more, and the winner grows. Which class wins seldom changes. Press Play."],
];
// Tasks after the tour, some with an answer.
const tasks = () => [
  ["Draw a 4, then close its top: at which stroke does it become a 9?"],
  about.objects > 1
    ? ["Draw two digits over each other: does a second capsule grow?"]
    : ["Draw two digits over each other: why do two capsules not grow?",
      "The network was trained on single digits. There, one capsule should be long and all others short. "
      + "A network trained on pairs of digits can make two capsules long."],
  ["Fool the network: draw something that is no digit and get a confident answer."],
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
  $(".tour ol").replaceChildren(...(isOver ? tasks() : []).map(([task, answer]) => make("li", task, ...hidden(answer))));
  $("[data-do=next]").textContent = isOver ? "Done" : "Next";
  $("[data-do=skip]").hidden = isOver;
  tour.hidden = false;
  tour.classList.toggle("tasks", isOver);
  const isFixed = getComputedStyle(tour).position === "fixed"; // on a phone the tasks are a part of the page
  element.style.setProperty("--tour", isFixed ? `${tour.offsetHeight + 28}px` : "0"); // the foot of the page is free for it
  const fits = innerWidth > 640 && panel.offsetHeight + tour.offsetHeight + 42 <= innerHeight;
  (isFixed ? panel : tour).scrollIntoView({ block: fits ? "nearest" : "start" });
}

// An answer that a click shows.
const hidden = (answer) => (answer ? [make("details", make("summary", "Answer"), make("p", answer))] : []);

function unmark() {
  $(".toured")?.classList.remove("toured");
}

function endTour() {
  if (!isTourSeen()) sweepLargest();
  unmark();
  $(".tour").hidden = true;
  element.style.removeProperty("--tour");
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
  const before = kept(), first = networks[0].images && await testImage(Math.min(FIRST_IMAGE, networks[0].images - 1));
  if (before) await restore(before);
  else if (first && state.pixels === null) await setImage(first); // a drawing made meanwhile stays
  if (about.noPose || about.slots) return; // the tour is about classes
  if (before && isTourSeen()) return;
  if (isTourSeen() || about.noRouting) sweepLargest();
  else showTour();
});
