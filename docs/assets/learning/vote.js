// One vote of a trained network, step by step: pose × matrix = vote, times its coupling, added to the other votes,
// squashed. vote.json holds the numbers; docs/learning_page.py writes it from the weights of `compact`.
import { button, draw, make, number } from "./drawing.js";

const BEAT = 350; // milliseconds from one step to the next
const ROW = 13, TOP = 44; // height of a component; its first row

const scalar = (u, v) => u.reduce((sum, x, n) => sum + x * v[n], 0);
const norm = (v) => Math.sqrt(scalar(v, v));
const bracketed = (x) => (number(x).startsWith("−") ? `(${number(x)})` : number(x));
const signed = (x) => (x < 0 ? "negative" : "positive");

// Returns every number of one cell's vote.
export function compute({ cells, sum, digit }, index) {
  const { pose, matrix, coupling } = cells[index], vote = matrix.map((row) => scalar(row, pose));
  const weighted = vote.map((x) => coupling * x), others = sum.map((x, d) => x - weighted[d]), n = scalar(sum, sum);
  return { pose, matrix, coupling, vote, weighted, others, sum, capsule: sum.map((x) => (n / (1 + n) / Math.sqrt(n + 1e-7)) * x), digit };
}

function oneVote(place, data) {
  const { size, patch, digit } = data, [rows, columns] = size, [high, wide] = data.shape, depth = data.sum.length, LAST = depth + 3;
  let chosen = data.first, at = 0, timer = null;

  const canvas = make("canvas", { width: wide, height: high, role: "img", "aria-label": `A ${digit}` }), over = draw("svg", { viewBox: `0 0 ${wide} ${high}` });
  const says = make("p", { class: "says", "aria-live": "polite" }), [left, right] = [270, 330].map((long) => draw("svg", { class: "numbers", viewBox: `0 0 ${long} ${TOP + depth * ROW + 6}`, role: "img" }));
  left.setAttribute("aria-label", "Pose times matrix is the vote");
  right.setAttribute("aria-label", "The weighted vote, the other votes, their sum and the capsule");
  const back = button("Back", () => show(chosen, at - 1)), next = button("Next", () => show(chosen, at + 1)), play = button("▶ Play", animate);
  place.replaceChildren(
    make("div", { class: "steps-of-vote" }, back, next, play), says,
    make("div", { class: "parts" }, make("div", { class: "image" }, canvas, over), left, right),
  );
  const image = new ImageData(wide, high);
  data.pixels.forEach((value, n) => image.data.set([value, value, value, 255], 4 * n));
  canvas.getContext("2d").putImageData(image, 0, 0);

  // Returns the patch of the image that a cell sees, cut off at the edges: x, y, width, height.
  function patchOf(row, column) {
    const [[top, bottom], [left, right]] = [[row, high], [column, wide]].map(([n, most], axis) => {
      const from = patch.first[axis] + n * patch.stride[axis];
      return [Math.max(from, 0), Math.min(from + patch.size[axis], most)];
    });
    return { x: left, y: top, width: right - left, height: bottom - top };
  }

  function showImage() {
    const [h, w] = [high / rows, wide / columns];
    const cells = data.cells.map((_, n) => {
      const [row, column] = [Math.floor(n / columns), n % columns];
      const cell = draw("rect", {
        class: `cell${n === chosen ? " chosen" : ""}`, x: column * w, y: row * h, width: w, height: h,
        tabindex: n === chosen ? 0 : -1, role: "button", "aria-label": `Row ${row + 1}, column ${column + 1}`,
      });
      cell.addEventListener("click", () => show(n, 0));
      cell.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
        const to = by && [row + by[0], column + by[1]];
        if (!to || to[0] < 0 || to[1] < 0 || to[0] >= rows || to[1] >= columns) return;
        event.preventDefault();
        show(to[0] * columns + to[1], 0);
        over.querySelector(".chosen").focus();
      });
      return cell;
    });
    over.replaceChildren(...cells, draw("rect", { class: "patch", "pointer-events": "none", ...patchOf(Math.floor(chosen / columns), chosen % columns) }));
  }

  // ---- the numbers as bars and as a coloured matrix ----

  // Draws components as bars from a middle line; `largest` fills the width.
  function bars(title, values, largest, x, isLater, now = -1) {
    const middle = x + 32, made = values.map((value, d) => {
      const long = (30 * Math.abs(value)) / largest;
      return draw("rect", { class: `${signed(value)}${isLater(d) ? " later" : ""}${d === now ? " now" : ""}`, x: value < 0 ? middle - long : middle, y: TOP + d * ROW + 2, width: long, height: ROW - 4 });
    });
    const line = draw("line", { class: "zero", x1: middle, x2: middle, y1: TOP, y2: TOP + depth * ROW });
    return draw("g", {}, draw("text", { class: "title", x: middle, y: TOP - 8, "text-anchor": "middle" }, title), line, ...made);
  }

  const sign = (text, x) => draw("text", { class: "title", x, y: TOP + (depth * ROW) / 2, "text-anchor": "middle" }, text);
  const opacity = (value, largest) => ({ "fill-opacity": Math.min(1, Math.abs(value) / largest).toFixed(3) });

  function showNumbers(one) {
    const { pose, matrix, vote, weighted, others, sum, capsule, coupling } = one, d = at - 1, wideCell = 15;
    const most = (...lists) => Math.max(...lists.flat().map(Math.abs)), [ofPose, ofMatrix] = [most(pose), most(...matrix)];
    const cell = (value, largest, x, y, d) => draw("rect", { class: `${signed(value)}${d === at - 1 && at <= depth ? " now" : ""}`, x, y, width: wideCell - 2, height: ROW - 2, ...opacity(value, largest) });
    left.replaceChildren(
      draw("text", { class: "title", x: 60, y: 11, "text-anchor": "middle" }, "pose × matrix"),
      ...pose.map((value, k) => cell(value, ofPose, k * wideCell, 20)),
      ...matrix.flatMap((row, n) => row.map((value, k) => cell(value, ofMatrix, k * wideCell, TOP + n * ROW + 1, n))),
      sign("=", 138), bars("vote", vote, most(vote), 152, (n) => n > d, at <= depth ? d : -1),
      ...vote.map((value, n) => draw("text", { class: n > d ? "later" : "", x: 226, y: TOP + n * ROW + 10 }, n > d ? "" : number(value))));
    const scale = most(weighted, others, sum), from = (stage) => () => at < depth + stage;
    right.replaceChildren(
      bars(`${coupling.toFixed(2)} · vote`, weighted, scale, 0, from(1)), sign("+", 73), bars("other votes", others, scale, 82, from(2)),
      sign("=", 155), bars("sum", sum, scale, 164, from(2)), sign("→", 238), bars("squashed", capsule, most(capsule), 252, from(3)));
  }

  function words({ pose, matrix, vote, coupling, sum, capsule }) {
    const name = `row ${Math.floor(chosen / columns) + 1}, column ${(chosen % columns) + 1}`, d = at - 1;
    if (at === 0) return `The pose of a capsule at ${name}: ${pose.length} numbers. Of the cell's ${data.types} capsules it is the one most strongly coupled with the ${digit}. The square marks the pixels that it sees.`;
    if (at <= depth) return `Component ${at} of the vote for the ${digit}: ${matrix[d].map((w, k) => `${number(w)}·${bracketed(pose[k])}`).join(" + ").replaceAll("+ −", "− ")} = ${number(vote[d])}.`;
    if (at === depth + 1) return `Routing gives the ${digit} the share ${coupling.toFixed(2)} of this vote (uniform: ${(1 / data.classes).toFixed(2)}). The bars right of here have a scale of their own.`;
    if (at === depth + 2) return `The other ${data.cells.length * data.types - 1} votes for the ${digit}, each times its own coupling, are added. The sum has length ${number(norm(sum))}.`;
    return `The squash keeps the direction and makes length ${number(norm(sum))} a length of ${number(norm(capsule))}: the score of the ${digit}.`;
  }

  function show(cell, step) {
    clearInterval(timer);
    render(cell, step);
  }

  function render(cell, step) {
    [chosen, at] = [cell, Math.max(0, Math.min(LAST, step))];
    const one = compute(data, chosen);
    showImage();
    showNumbers(one);
    says.textContent = words(one);
    [back.disabled, next.disabled] = [at === 0, at === LAST];
  }

  function animate() {
    show(chosen, at === LAST ? 0 : at);
    let wait = 0; // beats for which a step with a sentence of its own is held
    timer = setInterval(() => {
      if (wait-- > 0) return;
      render(chosen, at + 1);
      wait = at > depth ? 7 : 0;
      if (at === LAST) clearInterval(timer);
    }, BEAT);
  }

  show(chosen, 0);
  place.vote = { compute: (index) => compute(data, index) };
}

for (const place of document.querySelectorAll(".one-vote")) {
  const response = await fetch(new URL("vote.json", import.meta.url));
  if (response.ok) oneVote(place, await response.json());
}
