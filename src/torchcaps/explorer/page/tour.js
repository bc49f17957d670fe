// ---- the page opens with a tour of four steps for those who have not seen it, and with a digit that moves ----

const TOUR = [
  [".capsules", "1. Length", "Each class has a capsule, a small vector. Its length says how sure the network is that the class is there."],
  [".components", "2. Pose", "The components of the longest capsule say how the digit looks: its slant, its size, the width of its strokes. Move one."],
  [".decoded", "3. Reconstruction", "The decoder draws this from that one capsule alone. What it leaves out, the capsule does not know."],
  [".routing", "4. Agreement", "Small capsules of the image vote for the classes. In each iteration the votes that agree count for more. Press Play."],
];
const TASKS = [
  "Draw a 4, then close its top: at which stroke does it become a 9?",
  "Draw two digits over each other: does a second capsule grow?",
  "Fool the network: draw what is no digit, and look for an answer that it is sure of.",
];
const OPENED = 4; // the test image that the page opens with

let stop = 0; // of the tour; behind its last step are the tasks

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
  tour.classList.toggle("above", panel.getBoundingClientRect().top > tour.offsetHeight + 20); // where it covers nothing of the panel
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
  } catch {} // a browser that keeps nothing shows the tour again
}

// The page moves by itself once: the largest component of the capsule goes from end to end.
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

// A test image, and the tour, after which its capsule's largest component is swept once.
const openAlive = safely(async () => {
  if (learning) return;
  if (networks[0].images) await setImage(await testImage(Math.min(OPENED, networks[0].images - 1)));
  if (about.noPose) return;
  if (isTourSeen() || about.noRouting) sweepLargest();
  else showTour();
});
