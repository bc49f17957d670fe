// ---- the image: draw, pick, upload, undo ----
import { look } from "./answers.js";
import { ask } from "./ask.js";
import { choose, showNothing } from "./capsules.js";
import {
  $, about, channels, decodeBytes, drawing, element, height, ink, networks, paint, safely, state, width,
} from "./core.js";
import { stopSweep } from "./pose.js";

const past = []; // earlier images, for Undo; the latest is the last
const MAX_PAST = 50; // images

export function remember() {
  const { pixels, test, label, original } = state;
  if (past.push({ pixels, test, label, original }) > MAX_PAST) past.shift();
  $("[data-do=undo]").disabled = false;
}

// True if the image was drawn, picked or uploaded by the user.
export const isOwn = () => past.length > 0;

// Shows another image, or none. The choice of a capsule is reset, unless it is pinned or comes with the new image.
function take({ pixels, test = null, label = "", original = null, linkedPose = null, chosen }) {
  Object.assign(state, { pixels, test, label, original, linkedPose });
  if (chosen !== undefined) choose(chosen);
  else if (!state.pinned) choose(null);
  $(".prompt").hidden = pixels !== null;
  $("[name=test]").value = test ?? "";
  $(".label").textContent = label;
  $(".original").hidden = !original;
  if (original) $(".original img").src = original;
  stopSweep();
  return pixels ? look() : showNothing();
}

export function setImage(image) {
  if (image.pixels) paint(drawing, image.pixels);
  else clearDrawing();
  return take(image);
}

export function setNewImage(image) {
  remember();
  return setImage(image);
}

export const takeDrawing = () => take({ pixels: readDrawing() });

// Returns the drawing as C·H·W bytes.
function readDrawing() {
  const size = height * width, { data } = ink.getImageData(0, 0, width, height);
  return Uint8Array.from({ length: channels * size }, (_, n) => {
    const c = Math.floor(n / size);
    return data[4 * (n % size) + (channels === 3 ? c : 0)];
  });
}

function clearDrawing() {
  [drawing.width, drawing.height] = [width, height];
  ink.fillStyle = "black";
  ink.fillRect(0, 0, width, height);
}

export async function testImage(index) {
  if (!Number.isInteger(index)) throw new Error(`Give the number of a test image, 0 to ${networks[0].images - 1}.`);
  const { pixels, label } = await ask("pick", { index });
  return { pixels: decodeBytes(pixels), test: index, label: about.slots ? `It shows ${label}.` : `Its label is ${label}.` };
}

export const pick = async (index) => setNewImage(await testImage(index));

async function upload(file) {
  if (file.size > networks[0].maxFileBytes)
    throw new Error(`“${file.name}” is larger than ${networks[0].maxFileBytes / 2 ** 20} MiB; choose a smaller image.`);
  const address = await new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`“${file.name}” could not be read.`));
    reader.readAsDataURL(file);
  });
  const data = address.slice(address.indexOf(",") + 1), prepare = $("[name=prepare]").checked;
  const { pixels, changes } = await ask("read", { name: file.name, data, prepare });
  const changed = changes.length ? ` Prepared for the network: ${changes.join("; ")}.` : "";
  const original = changes.length ? address : null;
  return setNewImage({ pixels: decodeBytes(pixels), label: `${file.name}.${changed}`, original });
}

const imageIn = (given) => [...(given?.files ?? [])].find((file) => file.type.startsWith("image/"));

// ---- the pen ----

const pen = { x: width / 2, y: height / 2, down: false };

function strokeTo(x, y) {
  Object.assign(ink, { strokeStyle: "white", lineWidth: Number($("[name=width]").value), lineCap: "round" });
  ink.beginPath();
  ink.moveTo(pen.x, pen.y);
  ink.lineTo(x + 0.01, y); // a line of length 0 would draw no dot
  ink.stroke();
  Object.assign(pen, { x, y });
}

function place(event) {
  const { left, top, width: w, height: h } = drawing.getBoundingClientRect();
  return [((event.clientX - left) / w) * width, ((event.clientY - top) / h) * height];
}

drawing.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || !event.isPrimary) return; // one pen: ignore a second finger
  drawing.setPointerCapture(event.pointerId);
  const [x, y] = place(event);
  Object.assign(pen, { x, y, down: true });
  $(".pen").hidden = true;
  remember();
  strokeTo(x, y);
  takeDrawing();
});
drawing.addEventListener("pointermove", (event) => {
  if (!event.isPrimary || !drawing.hasPointerCapture(event.pointerId)) return;
  for (const step of event.getCoalescedEvents?.() ?? [event]) strokeTo(...place(step));
  takeDrawing();
});
for (const end of ["pointerup", "pointercancel"])
  drawing.addEventListener(end, (event) => (pen.down &&= !event.isPrimary));

export const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
drawing.addEventListener("keydown", (event) => {
  if (event.key === " ") {
    pen.down = !pen.down;
    if (pen.down) {
      remember();
      strokeTo(pen.x, pen.y);
    }
  } else if (event.key in STEPS) {
    const [dx, dy] = STEPS[event.key];
    const x = Math.min(Math.max(pen.x + dx, 0), width), y = Math.min(Math.max(pen.y + dy, 0), height);
    if (pen.down) strokeTo(x, y);
    else Object.assign(pen, { x, y });
  } else return;
  event.preventDefault(); // the page would scroll
  showPen();
  if (pen.down) takeDrawing();
});
drawing.addEventListener("blur", () => {
  pen.down = false;
  $(".pen").hidden = true;
});

function showPen() {
  const mark = $(".pen");
  mark.hidden = false;
  mark.classList.toggle("down", pen.down);
  mark.style.left = `${(100 * pen.x) / width}%`;
  mark.style.top = `${(100 * pen.y) / height}%`;
}

export function undo() {
  const before = past.pop();
  $("[data-do=undo]").disabled = !past.length;
  return before && setImage(before);
}

export function buildImage() {
  const control = $("[name=width]"), usual = Math.max(height, width) * 0.085;
  Object.assign(control, { min: usual / 3, max: usual * 2, step: "any", value: usual });
  const name = () => control.setAttribute("aria-valuetext", `${Number(control.value).toFixed(1)} pixels`);
  control.addEventListener("input", name);
  name();
  $("[data-do=undo]").disabled = true;
  const shown = networks[0];
  $("[name=test]").max = Math.max(shown.images - 1, 0);
  if (!shown.images) element.querySelectorAll(".test input, .test button").forEach((each) => (each.disabled = true));
  $(".missing").textContent = shown.images ? `There are ${shown.images}: ${shown.imagesOf}.` : shown.noImages;
  $(".unprepared").textContent = shown.unprepared ?? "";
  $(".prepare").hidden = !shown.prepares;
  $("[name=prepare]").checked = shown.prepares;

  $("[name=test]").addEventListener("change", safely(async ({ target }) => {
    if (target.value !== "") await pick(Number(target.value));
  }));
  $("[name=upload]").addEventListener("change", safely(async ({ target }) => {
    const [file] = target.files;
    target.value = ""; // so that the same file can be chosen again
    if (file) await upload(file);
  }));
  document.addEventListener("paste", (event) => {
    const file = imageIn(event.clipboardData);
    if (file) safely(upload)(file);
  });
  document.addEventListener("dragover", (event) => event.preventDefault()); // otherwise the browser would open the file
  document.addEventListener("drop", safely(async (event) => {
    event.preventDefault();
    if (!event.dataTransfer.files.length) return;
    const file = imageIn(event.dataTransfer);
    if (!file) throw new Error(`“${event.dataTransfer.files[0].name}” is not an image file.`);
    await upload(file);
  }));
  document.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.shiftKey || event.key !== "z" || event.target.type === "number") return;
    event.preventDefault();
    safely(undo)();
  });
}
