// The state of the page, and what all panels use: messages, pixels, words and elements. Each panel is a module of its own,
// and start.js builds them all. `props` are the facts that the server writes (see Questions.about).
import { props } from "./about.js";

export const { networks } = props, element = document.body;
export const $ = (selector) => element.querySelector(selector);
export const page = $(".explorer"), drawing = $(".drawing"), whole = $(".whole");
export const ink = drawing.getContext("2d", { willReadFrequently: true });
export let about = networks[0]; // the network in front: the panels show its capsules and its routing
export const setAbout = (network) => (about = network);
export const [channels, height, width] = about.shape;

export const state = {
  pixels: null, // C·H·W bytes of the image; null without an image
  test: null, // number of the test image; null for any other image
  label: "", // description of the image
  original: null, // address of the file that a prepared image was made from; null for other images
  views: [], // answer of each network
  view: null, // answer of the network in front
  cell: null, // [row, column] of the cell of the routing maps whose votes are shown
  iterations: 0, // routing iterations; 0: the network's own number
  chosen: null, // class of the capsule to edit; null: the longest
  pinned: false, // keep the chosen class for other images
  pose: null, // values of the sliders
  linkedPose: null, // capsule from a link; null without one
  decoded: null, // bytes of the reconstruction
};

// ---- messages and actions ----

export function say(text) {
  $(".message").textContent = text;
  $(".message").hidden = !text;
}

// Wraps an action so that its errors appear on the page. The page is marked as busy while an action runs.
let running = 0;
export const safely = (action) => async (...given) => {
  page.setAttribute("aria-busy", String(++running > 0));
  try {
    await action(...given);
  } catch (error) {
    say(error.message);
  } finally {
    page.setAttribute("aria-busy", String(--running > 0));
  }
};

// Runs one call of the action at a time. Calls meanwhile are merged into one, which uses the state at its start.
export function latest(action) {
  let isRunning = false, again = false;
  return safely(async () => {
    if (isRunning) return void (again = true);
    isRunning = true;
    try {
      do {
        again = false;
        await action();
      } while (again);
    } finally {
      isRunning = false;
    }
  });
}

// ---- pixels ----

export const encode = (bytes) => btoa(bytes.reduce((text, byte) => text + String.fromCharCode(byte), ""));
export const decodeBytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

// Paints C·H·W bytes on a canvas of H×W pixels: three channels as colours, otherwise their mean as grey.
export function paint(canvas, bytes, h = height, w = width) {
  const size = h * w, planes = bytes.length / size;
  return paintPixels(canvas, h, w, (i, c) => {
    if (planes === 3) return bytes[c * size + i];
    let sum = 0;
    for (let plane = 0; plane < planes; plane++) sum += bytes[plane * size + i];
    return sum / planes;
  });
}

// Paints a canvas of h×w pixels; `value(i, c)` is the byte of pixel i in red, green or blue (c = 0, 1, 2).
export function paintPixels(canvas, h, w, value) {
  [canvas.width, canvas.height] = [w, h];
  const image = new ImageData(w, h);
  for (let i = 0; i < h * w; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = value(i, c);
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

export function picture(label, paintOn) {
  const canvas = paintOn(document.createElement("canvas"));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  return canvas;
}

export function figure(bytes, j, colour) {
  const name = about.classes[j], words = about.slots ? `Part of ${name}` : `Reconstruction from capsule ${name} alone`;
  const canvas = picture(words, (on) => paint(on, decodeBytes(bytes)));
  const caption = make("figcaption", name), made = make("figure", canvas, caption);
  caption.style.setProperty("--own", colour);
  return made;
}

// ---- words and elements ----

// Colour of the n-th object, or of slot j; colours repeat.
export const colour = (n, j) => about.colours[(about.slots ? j : n) % about.colours.length];
export const short = (share) => share.toFixed(2).replace(/^0/, "");
// A number with its sign and two decimals; a number that is rounded to zero has no sign.
export const signed = (number) => {
  const digits = Math.abs(number).toFixed(2);
  return (digits === "0.00" ? "" : number < 0 ? "−" : "+") + digits;
};

// Describes the scores of a network: lengths or activations of capsules, or probabilities.
export const scoreWords = ({ score, components, objects, slots }) =>
  slots ? "share of the image of each slot; they sum to 1" : components ? `${score} of each class's capsule${{ length: "; no probability", score: "; they sum to 1" }[score] ?? ""}` : `${score} of each class${objects > 1 ? "" : "; they sum to 1"}`;

export function showNames() {
  $(".network").textContent = networks.map(({ name, what }) => (what ? `${name}: ${what}` : name)).join(" · ");
}

// Returns why the network in front has no decoder ("noPose") or no routing ("noRouting"); null if it has.
export function lack(name) {
  const why = about[name], otherHas = networks.some((network) => !network[name]);
  return why && otherHas ? `${why.slice(0, -1)}; choose the other network.` : why;
}

export function make(kind, ...parts) {
  const made = document.createElement(kind);
  made.append(...parts);
  return made;
}

export function classed(name, made) {
  made.className = name;
  return made;
}

// A bar of a score, 0 to 1.
export function track(share) {
  const made = classed("track", make("span"));
  made.style.setProperty("--share", Math.min(share, 1));
  return made;
}
