// ---- a cell of the routing maps: its patch of the image, and the votes of its capsules ----
import { ask } from "./ask.js";
import {
  $, about, classed, encode, height, latest, make, networks, paint, picture, signed, state, width,
} from "./core.js";
import { STEPS } from "./image.js";

let pointed = null; // [row, column] of the cell under the pointer, or reached by the arrow keys
let votes = null; // agreement and coupling of the chosen cell, state.cell: [iteration][capsule][class]

const CELL_HINT = "Point at a cell, or use the arrow keys, to see its patch of the image; click it, or press Enter, for its votes.";

// Outlines a part of an element; all values are shares of its height and width.
function outline(holder, top, left, high, wide) {
  for (const [name, share] of Object.entries({ top, left, high, wide })) holder.style.setProperty(`--${name}`, `${100 * share}%`);
}

// Returns the first pixel (row, column) of a cell's patch and the pixel after its last, cut off at the image's edge.
function patchOf(cell) {
  const { first, stride, size } = about.patches, from = cell.map((n, axis) => first[axis] + n * stride[axis]);
  const within = (at, axis) => Math.min(Math.max(at, 0), [height, width][axis]);
  return [from.map(within), from.map((at, axis) => within(at + size[axis], axis))];
}

function showCell() {
  const cell = pointed ?? state.cell, routing = state.view?.routing, isSeen = Boolean(cell && routing);
  $(".maps").classList.toggle("pointed", isSeen);
  $(".patch").hidden = !isSeen || !about.patches;
  $("#cell").textContent = CELL_HINT;
  if (!isSeen) return;
  const [rows, columns] = routing.size, [row, column] = cell, name = `Row ${row + 1}, column ${column + 1}`;
  outline($(".maps"), row / rows, column / columns, 1 / rows, 1 / columns);
  $("#cell").textContent = `${name} of the maps.`;
  if (!about.patches) return;
  const [[top, left], [bottom, right]] = patchOf(cell);
  outline($(".patch"), top / height, left / width, (bottom - top) / height, (right - left) / width);
  $("#cell").textContent = `${name} sees rows ${top + 1} to ${bottom}, columns ${left + 1} to ${right} of the image.`;
}

function point(cell) {
  if (String(cell) === String(pointed)) return;
  pointed = cell;
  showCell();
}

function chooseCell(cell) {
  state.cell = String(cell) === String(state.cell) ? null : cell;
  showVotes();
}

export const showVotes = latest(async () => {
  const { cell, view, pixels, iterations } = state;
  votes = null;
  $(".votes").hidden = !cell || !view?.routing;
  showCell();
  if ($(".votes").hidden) return;
  const found = await ask("votes", { network: networks.indexOf(about), pixels: encode(pixels), iterations, cell });
  if (view !== state.view || cell !== state.cell) return; // the image or the cell has changed, and the question is asked again
  votes = found;
  drawVotes(Math.round($("[name=iteration]").value) - 1);
});

// Draws a table: a row for each capsule of the cell, a column for each class; numbers are agreement, colours coupling.
export function drawVotes(t) {
  if (!votes || votes.drawn === t) return;
  votes.drawn = t;
  const { uniform, reach, classes } = state.view.routing, [agreement, coupling] = [votes.agreement[t], votes.coupling[t]];
  const cell = (a, c) => {
    const made = make("td", signed(a) === "0.00" ? "0" : signed(a).replace("0.", "."));
    made.classList.toggle("above", c > uniform);
    made.style.setProperty("--share", `${40 * Math.sqrt(Math.min(Math.abs(c - uniform) / reach, 1))}%`);
    made.title = `agreement ${signed(a)}, coupling ${c.toFixed(3)}`;
    return made;
  };
  const head = ["capsule", ...classes.map((j) => about.classes[j])].map((text) => make("th", text));
  const rows = agreement.map((row, type) => make("tr", make("th", String(type)), ...row.map((a, n) => cell(a, coupling[type][n]))));
  const words = make("p", `The votes of this cell's ${rows.length} capsules. Numbers: agreement of a vote with the capsule of a class. `
    + "Colour: its coupling, as in the maps. Step through the iterations: votes that agree turn red.");
  const seen = about.patches ? [picture("The patch of the image that the cell sees", paintPatch)] : [];
  $(".votes").replaceChildren(classed("hint", make("div", ...seen, words)),
    classed("scroll", make("div", make("table", make("thead", make("tr", ...head)), make("tbody", ...rows)))));
}

function paintPatch(canvas) {
  const [[top, left], [bottom, right]] = patchOf(state.cell), row = (n) => Math.floor(n / width) % height;
  const inside = (_, n) => row(n) >= top && row(n) < bottom && n % width >= left && n % width < right;
  return paint(canvas, state.pixels.filter(inside), bottom - top, right - left);
}

export function buildCells() {
  const maps = $(".maps"), size = () => state.view.routing.size;
  const under = (event) => {
    const map = event.target.closest(".map");
    if (!map) return null;
    const { left, top, width: w, height: h } = map.getBoundingClientRect(), [rows, columns] = size();
    const at = (share, n) => Math.min(Math.max(Math.floor(share * n), 0), n - 1);
    return [at((event.clientY - top) / h, rows), at((event.clientX - left) / w, columns)];
  };
  maps.addEventListener("pointermove", (event) => point(under(event)));
  maps.addEventListener("pointerleave", () => point(null));
  maps.addEventListener("click", (event) => under(event) && chooseCell(under(event)));
  maps.addEventListener("focus", () => point(pointed ?? state.cell ?? [0, 0]));
  maps.addEventListener("blur", () => point(null));
  maps.addEventListener("keydown", (event) => {
    const step = STEPS[event.key], from = pointed ?? state.cell ?? [0, 0];
    if (step) point([1, 0].map((axis, n) => Math.min(Math.max(from[n] + step[axis], 0), size()[n] - 1)));
    else if (["Enter", " "].includes(event.key)) chooseCell(from);
    else return;
    event.preventDefault(); // the page would scroll
  });
}
