// ---- sharing: link and picture ----
import { ownClass, verdict } from "./capsules.js";
import {
  $, about, channels, decodeBytes, drawing, element, encode, height, make, safely, state, whole, width,
} from "./core.js";
import { isOwn, setNewImage, testImage } from "./image.js";
import { isMoved } from "./pose.js";
import { routeIn } from "./routing.js";

// The state that a link holds: `write` returns the text of a part, null to leave it out; `read` returns the part's share of
// the image, and throws an error if it does not fit this network. A link has a test image or pixels.
const LINKED = {
  test: { write: () => state.test, read: (text) => testImage(Number(text)) },
  pixels: { write: () => (state.test === null ? encode(state.pixels) : null), read: linkedImage },
  class: {
    write: () => (state.chosen === null ? null : about.classes[state.chosen]),
    read: (name) => ({ chosen: classNamed(name) }),
  },
  iterations: { write: () => state.iterations || null, read: routeIn },
  pose: { write: () => (isMoved() ? state.pose.join(",") : null), read: (text) => ({ linkedPose: numbersIn(text) }) },
};

// Returns an address whose part after the # restores the state.
export function link() {
  const written = Object.entries(LINKED).map(([name, { write }]) => [name, write()]);
  const parts = new URLSearchParams(written.filter(([, text]) => text !== null));
  return `${location.pathname}${location.search}#${parts}`;
}

// The image survives a reload, and Back from another page: the window keeps the text of its link.
const KEPT = `torchcaps-image ${location.pathname}`;

export function keep() {
  try {
    if (state.pixels && isOwn()) sessionStorage.setItem(KEPT, link().split("#")[1]);
    else sessionStorage.removeItem(KEPT);
  } catch {} // a browser without storage forgets the image
}

export function kept() {
  try {
    return sessionStorage.getItem(KEPT);
  } catch {
    return null;
  }
}

export const restore = safely(async (text = location.hash.slice(1)) => {
  const parts = new URLSearchParams(text), image = { linkedPose: null, chosen: null };
  if (!parts.has("test") && !parts.has("pixels")) return;
  routeIn(null); // unless the link names another number
  for (const [name, { read }] of Object.entries(LINKED)) if (parts.has(name)) Object.assign(image, await read(parts.get(name)));
  return setNewImage(image);
});

function classNamed(name) {
  const chosen = about.classes.indexOf(name);
  if (chosen === -1) throw new Error(`The link names the class “${name}”, which this network does not have.`);
  return chosen;
}

function numbersIn(text) {
  const pose = text.split(",").map(Number);
  if (!pose.every(Number.isFinite)) throw new Error("The link is broken: its components are not numbers.");
  return pose;
}

function linkedImage(text) {
  let pixels;
  try {
    pixels = decodeBytes(text);
  } catch {
    throw new Error("The link is broken: its image was cut off.");
  }
  if (pixels.length !== channels * height * width)
    throw new Error(`The link is for another network: this one takes images of ${about.shape.join("×")} pixels.`);
  return { pixels };
}

// Saves the drawing and the reconstruction side by side, ten times enlarged, with captions.
export function download() {
  const apart = [...element.querySelectorAll(".apart figure")];
  const of = state.test === null ? state.label || "The image." : `Test image ${state.test}. ${state.label}`;
  const seen = make("p", ...verdict(state.view, about)).textContent;
  const overlaid = $("[name=overlay]").checked ? " Image orange, reconstruction blue, both white." : "";
  const panels = [
    [drawing, `${of} ${seen}`],
    ...(about.noPose ? [] : [[whole, $(".source").textContent + overlaid]]),
    ...apart.map((each) => [each.querySelector("canvas"), `Capsule ${each.textContent} alone.`]),
  ];
  const scale = 10, gap = 10, line = 18, w = width * scale, h = height * scale;
  const sheet = document.createElement("canvas"), on = sheet.getContext("2d"), font = "14px system-ui, sans-serif";
  on.font = font;
  const captions = panels.map(([, caption]) => wrapped(on, caption, w));
  const titles = wrapped(on, `${about.name}: ${about.what}`, panels.length * (w + gap) - gap);
  const below = gap + h + gap + line * Math.max(...captions.map((lines) => lines.length)) + gap;
  Object.assign(sheet, { width: gap + panels.length * (w + gap), height: below + line * titles.length + gap });
  Object.assign(on, { fillStyle: "white", imageSmoothingEnabled: false });
  on.fillRect(0, 0, sheet.width, sheet.height);
  Object.assign(on, { font, fillStyle: "black", textBaseline: "top" });
  const write = (lines, x, y) => lines.forEach((text, n) => on.fillText(text, x, y + n * line));
  panels.forEach(([panel], n) => {
    const left = gap + n * (w + gap);
    on.drawImage(panel, left, gap, w, h);
    write(captions[n], left, gap + h + gap);
  });
  write(titles, gap, below);
  const anchor = document.createElement("a");
  Object.assign(anchor, { href: sheet.toDataURL("image/png"), download: `torchcaps-${about.classes[ownClass()]}.png` });
  anchor.click();
}

function wrapped(on, text, most) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (on.measureText(longer).width <= most) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}
