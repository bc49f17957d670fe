// What the browser does. Gradio runs this once, with `element` (the page) and `props.about` (see messages.describe).
const about = props.about;
const [channels, height, width] = about.shape;
const $ = (selector) => element.querySelector(selector);
const page = $(".explorer"), drawing = $(".drawing"), whole = $(".whole");
const ink = drawing.getContext("2d", { willReadFrequently: true });

const state = {
  pixels: null, // C·H·W bytes of the image; null while there is none
  test: null, // its number, if it is an untouched test image
  view: null, // what the network says about it
  chosen: null, // the class whose capsule is edited; null for the longest
  pose: null, // that capsule as the sliders have it
  wanted: null, // the capsule that a link brought with the image; null for an image that none brought
};

// ---- asking the network ----

// One of the functions of messages.answers.
async function ask(name, question) {
  const headers = { "Content-Type": "application/json" }, body = JSON.stringify(question);
  const answered = await fetch(`/ask/${name}`, { method: "POST", headers, body }).catch(() => null);
  const answer = await answered?.json().catch(() => null); // nothing where the server failed, or is gone
  if (!answer)
    throw new Error("The explorer does not answer. If it was stopped, start it again; else its terminal says more.");
  if (answer.error) throw new Error(answer.error);
  return answer;
}

function say(text) {
  $(".message").textContent = text;
  $(".message").hidden = !text;
}

// An action that says on the page what goes wrong in it; the page is busy as long as one goes on.
let going = 0;
const safely = (action) => async (...given) => {
  page.setAttribute("aria-busy", String(++going > 0));
  try {
    await action(...given);
  } catch (error) {
    say(error.message);
  } finally {
    page.setAttribute("aria-busy", String(--going > 0));
  }
};

// One run of the action at a time; of those asked for meanwhile only one more follows, with what is then current.
function latest(action) {
  let running = false, again = false;
  return safely(async () => {
    if (running) return void (again = true);
    running = true;
    try {
      do {
        again = false;
        await action();
      } while (again);
    } finally {
      running = false;
    }
  });
}

const look = latest(async () => {
  const pixels = state.pixels;
  if (!pixels) return;
  const view = await ask("look", { pixels: encode(pixels) });
  if (state.pixels === null) return; // cleared meanwhile
  state.view = view;
  say("");
  takePose(pixels === state.pixels ? state.wanted : null);
  showView();
});

const decode = latest(async () => {
  if (!state.view || about.noPose) return;
  const classes = decodedClasses(), own = ownClass();
  const poses = classes.map((j) => (j === own ? state.pose : state.view.capsules[j]));
  const { whole: bytes, apart } = await ask("decode", { classes, poses });
  if (!state.view) return; // cleared meanwhile
  paint(whole, decodeBytes(bytes));
  whole.setAttribute("aria-label", `Reconstruction from ${capsuleWords(classes)}`);
  $(".apart").replaceChildren(...apart.map((one, n) => figure(one, classes[n], colour(n))));
});

// ---- which capsules ----

// Of the n-th object; there are fewer colours than there may be objects.
const colour = (n) => about.colours[n % about.colours.length];

const ownClass = () => state.chosen ?? state.view.present[0];

// The classes that are decoded: the longest, the chosen one in place of the last of them where it is none of them.
function decodedClasses() {
  const { present } = state.view, own = ownClass();
  return present.includes(own) ? present : [...present.slice(0, -1), own];
}

const capsuleWords = (classes) =>
  (classes.length > 1 ? "capsules " : "capsule ") + classes.map((j) => about.classes[j]).join(" and ");

// The sliders take the capsule that the image gives, unless a link brought another.
function takePose(wanted = null) {
  if (!state.view.capsules) return;
  state.pose = [...state.view.capsules[ownClass()]];
  if (!wanted) return;
  if (wanted.length === state.pose.length) state.pose = wanted;
  else say(`The link has ${wanted.length} components, but a capsule of this network has ${state.pose.length}.`);
}

// ---- pixels ----

const encode = (bytes) => btoa(bytes.reduce((text, byte) => text + String.fromCharCode(byte), ""));
const decodeBytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

// C·H·W bytes onto a canvas of as many pixels: three channels as colours, else their mean as grey.
function paint(canvas, bytes, h = height, w = width) {
  [canvas.width, canvas.height] = [w, h];
  const size = h * w, planes = bytes.length / size, image = new ImageData(w, h);
  for (let i = 0; i < size; i++) {
    let sum = 0;
    for (let c = 0; c < planes; c++) sum += bytes[c * size + i];
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = planes === 3 ? bytes[c * size + i] : sum / planes;
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// The drawing as C·H·W bytes.
function readDrawing() {
  const size = height * width, { data } = ink.getImageData(0, 0, width, height);
  return Uint8Array.from({ length: channels * size }, (_, n) => {
    const c = Math.floor(n / size);
    return data[4 * (n % size) + (channels === 3 ? c : 0)];
  });
}

function figure(bytes, j, colour) {
  const canvas = paint(document.createElement("canvas"), decodeBytes(bytes));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Reconstruction from capsule ${about.classes[j]} alone`);
  const caption = document.createElement("figcaption");
  caption.textContent = about.classes[j];
  caption.style.setProperty("--own", colour);
  const made = document.createElement("figure");
  made.append(canvas, caption);
  return made;
}

// ---- the image ----

function setImage({ pixels, test = null, label = "", wanted = null }) {
  Object.assign(state, { pixels, test, wanted });
  paint(drawing, pixels);
  $(".prompt").hidden = true;
  $("[name=test]").value = test ?? "";
  $(".label").textContent = label;
  return look();
}

function takeDrawing() {
  Object.assign(state, { pixels: readDrawing(), test: null, wanted: null });
  $(".prompt").hidden = true;
  $("[name=test]").value = "";
  $(".label").textContent = "";
  return look();
}

function blank() {
  Object.assign(state, { pixels: null, test: null, view: null, pose: null, wanted: null });
  say("");
  paint(drawing, new Uint8Array(height * width));
  $(".prompt").hidden = false;
  $("[name=test]").value = "";
  $(".label").textContent = "";
  showNothing();
}

async function testImage(index) {
  if (!Number.isInteger(index)) throw new Error(`Give the number of a test image, 0 to ${about.images - 1}.`);
  const { pixels, label } = await ask("pick", { index });
  return { pixels: decodeBytes(pixels), test: index, label: `Its label is ${label}.` };
}

const pick = async (index) => setImage(await testImage(index));

async function upload(file) {
  if (file.size > about.largestFile)
    throw new Error(`“${file.name}” is larger than ${about.largestFile / 2 ** 20} MiB; choose a smaller image.`);
  const address = await new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`“${file.name}” could not be read.`));
    reader.readAsDataURL(file);
  });
  const { pixels } = await ask("read", { name: file.name, data: address.slice(address.indexOf(",") + 1) });
  await setImage({ pixels: decodeBytes(pixels), label: file.name });
}

// ---- the pen ----

const pen = { x: width / 2, y: height / 2, down: false };

function strokeTo(x, y) {
  Object.assign(ink, { strokeStyle: "white", lineWidth: Math.max(height, width) * 0.085, lineCap: "round" });
  ink.beginPath();
  ink.moveTo(pen.x, pen.y);
  ink.lineTo(x + 0.01, y); // a line without length would leave no dot
  ink.stroke();
  Object.assign(pen, { x, y });
}

function place(event) {
  const { left, top, width: w, height: h } = drawing.getBoundingClientRect();
  return [((event.clientX - left) / w) * width, ((event.clientY - top) / h) * height];
}

drawing.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || !event.isPrimary) return; // one pen: a second finger draws nothing
  drawing.setPointerCapture(event.pointerId);
  const [x, y] = place(event);
  Object.assign(pen, { x, y, down: true });
  $(".pen").hidden = true;
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

const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
drawing.addEventListener("keydown", (event) => {
  if (event.key === " ") {
    pen.down = !pen.down;
    if (pen.down) strokeTo(pen.x, pen.y);
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

// ---- showing ----

const short = (share) => share.toFixed(2).replace(/^0/, "");
const signed = (number) => (number < 0 ? "−" : "+") + Math.abs(number).toFixed(2);
const MOST_BARS = 20; // of more classes, only the longest and the chosen one are listed

// A screen reader reads the verdict aloud whenever it changes, so it changes only when it is another one.
function showVerdict(...parts) {
  const made = document.createElement("p");
  made.append(...parts);
  if (made.textContent !== $(".verdict").textContent) $(".verdict").replaceChildren(...parts);
}

function showNothing() {
  showVerdict("Draw, upload or pick an image.");
  showBars(about.classes.map(() => 0), []);
  paint(whole, new Uint8Array(height * width));
  whole.setAttribute("aria-label", "No reconstruction yet");
  $(".apart").replaceChildren();
  $(".source").textContent = "";
  $(".routing .scroll").replaceChildren();
  $(".routing .hint").textContent = about.noRouting ?? "Where each capsule takes its input from, once there is an image.";
  showSliders();
}

function showView() {
  const { scores, present, routing } = state.view;
  const names = bold(present.map((j) => about.classes[j]).join(" and "));
  if (scores[present.at(-1)] >= 0.5) showVerdict("The network sees ", names, ".");
  else showVerdict("Most like ", names, ", but the network is not sure.");
  showBars(scores, present);
  showSliders();
  if (routing) showRouting(routing, present);
  decode();
}

function bold(text) {
  const made = document.createElement("strong");
  made.textContent = text;
  return made;
}

function showBars(scores, present) {
  const ranked = scores.map((_, j) => j).sort((a, b) => scores[b] - scores[a]);
  const listed = new Set([...ranked.slice(0, MOST_BARS), state.chosen]);
  for (const row of element.querySelectorAll(".bar[data-class]")) {
    const j = Number(row.dataset.class), n = present.indexOf(j);
    row.hidden = !listed.has(j);
    row.classList.toggle("present", n >= 0);
    row.style.setProperty("--share", Math.min(scores[j], 1));
    row.style.setProperty("--own", about.objects > 1 && n >= 0 ? colour(n) : "");
    row.querySelector(".number").textContent = scores[j].toFixed(2);
    row.querySelector("input").setAttribute("aria-label", `${about.classes[j]}, ${about.score} ${scores[j].toFixed(2)}`);
  }
}

function showSliders() {
  const { pose, view } = state, own = pose && view.capsules[ownClass()];
  const largest = pose ? Math.max(...pose.map(Math.abs), ...own.map(Math.abs)) : 0;
  const reach = Math.max(0.5, Math.ceil(largest * 10) / 10); // most components stay within ±0.5, none goes beyond ±1
  $("#components-heading").textContent = pose ? `Components of capsule ${about.classes[ownClass()]}` : "Components";
  element.querySelectorAll(".slider").forEach((row, k) => {
    const slider = row.querySelector("input");
    Object.assign(slider, { min: -reach, max: reach, disabled: !pose, value: pose ? pose[k] : 0 });
    row.style.setProperty("--mark", pose ? (own[k] + reach) / (2 * reach) : 0.5);
    showValue(row, pose?.[k]);
  });
  showDecoded();
}

function showValue(row, value) {
  const slider = row.querySelector("input");
  row.querySelector("output").textContent = value === undefined ? "" : signed(value);
  slider.style.setProperty("--at", (Number(slider.value) - slider.min) / (slider.max - slider.min));
}

function showDecoded() {
  const { pose, view } = state;
  for (const name of ["reset", "copy", "download"]) $(`[data-do=${name}]`).disabled = !view;
  if (!pose || about.noPose) return;
  const changed = pose.some((value, k) => value !== view.capsules[ownClass()][k]);
  $("[data-do=reset]").disabled = !changed;
  const length = Math.hypot(...pose).toFixed(2);
  $(".source").textContent = `From ${capsuleWords(decodedClasses())}; ${
    about.objects > 1 ? `that of ${about.classes[ownClass()]} is of` : "its"
  } length ${length}${changed ? ", changed by the sliders" : ""}.`;
}

function showRouting(routing, present) {
  $(".routing .hint").textContent =
    `${routing.inSpace ? `Where each capsule takes its input from: coupling on the grid of the ${routing.inputs}` :
      `Coupling with the ${routing.inputs} in the order of their index, not in space`}, red above ` +
    `uniform (${routing.uniform}), blue below; here ${routing.range[0]} to ${routing.range[1]}. Under each map, the capsule's ` +
    `${about.score} after that iteration.`;
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  head.append(cell("th", "iteration", "col"), ...routing.classes.map((j) => {
    const made = cell("th", about.classes[j], "col");
    made.classList.toggle("present", present.includes(j));
    return made;
  }));
  const body = table.createTBody();
  routing.maps.forEach((maps, t) => {
    const row = body.insertRow();
    row.append(cell("th", t + 1, "row"));
    maps.forEach((bytes, n) => {
      const canvas = paint(document.createElement("canvas"), decodeBytes(bytes), ...routing.size);
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `mean coupling ${routing.means[t][n]}`);
      const made = row.insertCell();
      made.append(canvas, cell("span", short(routing.scores[t][n])));
    });
  });
  $(".routing .scroll").replaceChildren(table);
}

function cell(kind, text, scope) {
  const made = document.createElement(kind);
  made.textContent = text;
  if (scope) made.scope = scope;
  return made;
}

// ---- choosing a capsule, moving its components ----

function choose(j) {
  state.chosen = j;
  const row = element.querySelector(`[name=capsule][value="${j ?? "longest"}"]`);
  row.checked = true;
}

function chooseAndShow(j) {
  choose(j);
  if (!state.view) return;
  takePose();
  showBars(state.view.scores, state.view.present);
  showSliders();
  decode();
}

function moveSlider(k, value) {
  state.pose[k] = value;
  showValue(element.querySelectorAll(".slider")[k], value);
  showDecoded();
  decode();
}

// ---- sharing ----

// All that is needed to show the same again stands after the # of the address.
function link() {
  const { pixels, test, chosen, pose, view } = state, parts = new URLSearchParams();
  if (test !== null) parts.set("test", test);
  else parts.set("pixels", encode(pixels));
  if (chosen !== null) parts.set("class", about.classes[chosen]);
  if (pose?.some((value, k) => value !== view.capsules[ownClass()][k])) parts.set("pose", pose.join(","));
  return `${location.pathname}${location.search}#${parts}`;
}

const restore = safely(async () => {
  const parts = new URLSearchParams(location.hash.slice(1));
  if (!parts.has("test") && !parts.has("pixels")) return;
  const name = parts.get("class"), j = name === null ? null : about.classes.indexOf(name);
  if (j === -1) throw new Error(`The link names the class “${name}”, which this network has not.`);
  const wanted = parts.get("pose")?.split(",").map(Number) ?? null;
  if (wanted && !wanted.every(Number.isFinite)) throw new Error("The link is broken: its components are no numbers.");
  const image = parts.has("test") ? await testImage(Number(parts.get("test"))) : linkedImage(parts.get("pixels"));
  choose(j);
  return setImage({ ...image, wanted });
});

function linkedImage(text) {
  let pixels;
  try {
    pixels = decodeBytes(text);
  } catch {
    throw new Error("The link is broken: its image was cut.");
  }
  if (pixels.length !== channels * height * width)
    throw new Error(`The link is for another network: this one takes images of ${about.shape.join("×")} pixels.`);
  return { pixels };
}

// The drawing and the reconstruction side by side, ten times as large.
function download() {
  const panels = [drawing, whole, ...element.querySelectorAll(".apart canvas")].slice(0, about.noPose ? 1 : undefined);
  const sheet = document.createElement("canvas"), scale = 10, gap = 10;
  Object.assign(sheet, { width: panels.length * (width * scale + gap) - gap, height: height * scale });
  const on = sheet.getContext("2d");
  on.imageSmoothingEnabled = false;
  panels.forEach((panel, n) => on.drawImage(panel, n * (width * scale + gap), 0, width * scale, height * scale));
  const anchor = document.createElement("a");
  Object.assign(anchor, { href: sheet.toDataURL("image/png"), download: `torchcaps-${about.classes[ownClass()]}.png` });
  anchor.click();
}

const ACTIONS = {
  clear() {
    history.replaceState(null, "", location.pathname + location.search);
    blank();
  },
  reset() {
    takePose();
    showSliders();
    decode();
  },
  invert() {
    Object.assign(ink, { globalCompositeOperation: "difference", fillStyle: "white" });
    ink.fillRect(0, 0, width, height);
    ink.globalCompositeOperation = "source-over";
    return takeDrawing();
  },
  random() {
    return pick(Math.floor(Math.random() * about.images));
  },
  async copy() {
    history.replaceState(null, "", link());
    const button = $("[data-do=copy]");
    try {
      await navigator.clipboard.writeText(location.href);
      button.textContent = "Link copied";
    } catch {
      button.textContent = "Link is in the address bar";
    }
    setTimeout(() => (button.textContent = "Copy link"), 2000);
  },
  download,
};

// ---- building the page ----

function build() {
  $(".network").textContent = about.title;
  $(".bars legend").textContent = about.noPose
    ? "How sure the network is of each class"
    : `${about.score[0].toUpperCase()}${about.score.slice(1)} of each class's capsule; choose the one to decode`;
  const rows = [null, ...about.classes.keys()].map((j) => {
    const row = document.createElement("label"), radio = document.createElement("input");
    row.className = "bar";
    Object.assign(radio, { type: "radio", name: "capsule", value: j ?? "longest", checked: j === null });
    radio.addEventListener("change", () => chooseAndShow(j));
    row.append(radio, cell("span", j === null ? `the ${about.highest}` : about.classes[j]));
    if (j !== null) {
      row.dataset.class = j;
      const track = cell("span", ""), number = cell("span", "0.00");
      [track.className, number.className] = ["track", "number"];
      row.append(track, number);
    }
    return row;
  });
  $(".bars").append(...rows);
  if (about.noPose) element.querySelectorAll("[name=capsule]").forEach((radio) => (radio.disabled = true));

  for (let k = 0; k < about.components && !about.noPose; k++) {
    const row = document.createElement("div"), slider = document.createElement("input");
    row.className = "slider";
    row.append(cell("label", String(k)), slider, cell("output", ""));
    Object.assign(slider, { type: "range", step: "any", id: `component-${k}` });
    slider.setAttribute("aria-label", `Component ${k}`);
    row.querySelector("label").htmlFor = row.querySelector("output").htmlFor = slider.id;
    slider.addEventListener("input", () => moveSlider(k, Number(slider.value)));
    $(".sliders").append(row);
  }
  if (about.noPose) {
    $(".components .hint").textContent = about.noPose;
    whole.hidden = true;
  }
  if (!about.images) {
    element.querySelectorAll(".test input, .test button").forEach((control) => (control.disabled = true));
    $(".missing").textContent = about.noImages;
  }
  $("[name=test]").max = Math.max(about.images - 1, 0);

  for (const button of element.querySelectorAll("[data-do]"))
    button.addEventListener("click", safely(ACTIONS[button.dataset.do]));
  $("[name=test]").addEventListener("change", safely(async ({ target }) => {
    if (target.value !== "") await pick(Number(target.value));
  }));
  $("[name=upload]").addEventListener("change", safely(async ({ target }) => {
    const [file] = target.files;
    target.value = ""; // the same file may be chosen again
    if (file) await upload(file);
  }));
  window.addEventListener("hashchange", restore);
}

build();
blank();
restore();
