// What the browser does. The files page/*.js share their names, and run in the order of page.html: a panel each, between
// what they share and the start. `props` is in about.js, which the server writes (see Questions.about). This file: state,
// questions, pixels.
const { networks, learning } = props, element = document.body;
const $ = (selector) => element.querySelector(selector);
const page = $(".explorer"), drawing = $(".drawing"), whole = $(".whole");
const ink = drawing.getContext("2d", { willReadFrequently: true });
let about = networks[0]; // the network in front, whose capsules are moved and whose routing is followed
const [channels, height, width] = about.shape;

const state = {
  pixels: null, // C·H·W bytes of the image; null while there is none
  test: null, // its number, if it is an untouched test image
  label: "", // what is known of it, in words
  original: null, // the address of the file that it was prepared from; null for an image that was not prepared
  views: [], // what each network says about it
  view: null, // what the network in front says
  cell: null, // [row, column] of the routing maps whose votes are shown
  iterations: 0, // in which it routes; 0 for its own number
  chosen: null, // the class whose capsule is edited; null for the longest
  pinned: false, // whether it stays chosen for other images
  pose: null, // that capsule as the sliders have it
  wanted: null, // the capsule that a link brought with the image; null for an image that none brought
  decoded: null, // the bytes of the reconstruction
};

// ---- what is said, and what goes on ----

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
  const text = encode(pixels);
  const views = await Promise.all(networks.map((one, network) =>
    ask("look", { network, pixels: text, iterations: one === about ? state.iterations : 0 })));
  if (state.pixels === null) return; // cleared meanwhile
  Object.assign(state, { views, view: views[networks.indexOf(about)] });
  say("");
  takePose(pixels === state.pixels ? state.wanted : null);
  showView();
});

const decode = latest(async () => {
  if (!state.view || about.noPose) return;
  const classes = decodedClasses();
  const { whole: bytes, apart } = hasPicture() ? state.view.decoded : await askPicture(classes);
  if (!state.view) return; // cleared meanwhile
  state.decoded = decodeBytes(bytes);
  paintWhole();
  whole.setAttribute("aria-label", `Reconstruction from ${capsuleWords(classes)}`);
  $(".apart").replaceChildren(...apart.map((one, n) => figure(one, classes[n], colour(n))));
});

// The answer to an image has the picture of its highest classes; other capsules, and moved ones, are decoded on demand.
const hasPicture = () => !isMoved() && state.view.present.includes(ownClass());

function askPicture(classes) {
  const poses = classes.map((j) => (j === ownClass() ? state.pose : state.view.capsules[j]));
  return ask("decode", { network: networks.indexOf(about), classes, poses });
}

// ---- pixels ----

const encode = (bytes) => btoa(bytes.reduce((text, byte) => text + String.fromCharCode(byte), ""));
const decodeBytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

// C·H·W bytes onto a canvas of as many pixels: three channels as colours, else their mean as grey.
function paint(canvas, bytes, h = height, w = width) {
  const size = h * w, planes = bytes.length / size;
  return paintPixels(canvas, h, w, (i, c) => {
    if (planes === 3) return bytes[c * size + i];
    let sum = 0;
    for (let plane = 0; plane < planes; plane++) sum += bytes[plane * size + i];
    return sum / planes;
  });
}

// A canvas of h·w pixels, `value(i, c)` the byte of pixel i in red, green and blue (c = 0, 1, 2).
function paintPixels(canvas, h, w, value) {
  [canvas.width, canvas.height] = [w, h];
  const image = new ImageData(w, h);
  for (let i = 0; i < h * w; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = value(i, c);
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function picture(label, paintOn) {
  const canvas = paintOn(document.createElement("canvas"));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  return canvas;
}

function figure(bytes, j, colour) {
  const canvas = picture(`Reconstruction from capsule ${about.classes[j]} alone`, (on) => paint(on, decodeBytes(bytes)));
  const caption = make("figcaption", about.classes[j]), made = make("figure", canvas, caption);
  caption.style.setProperty("--own", colour);
  return made;
}

// ---- words and elements ----

// Of the n-th object; there are fewer colours than there may be objects.
const colour = (n) => about.colours[n % about.colours.length];
const short = (share) => share.toFixed(2).replace(/^0/, "");
const signed = (number) => (number < 0 ? "−" : "+") + Math.abs(number).toFixed(2);

// What the scores of a network are: lengths and activations of capsules, or probabilities, which are another thing.
const scoreWords = ({ score, components, objects }) =>
  components ? `${score} of each class's capsule` : `${score} of each class${objects > 1 ? "" : "; they sum to 1"}`;

// Why the network in front lacks something, `name` being noPose or noRouting; null where it does not.
function lack(name) {
  const why = about[name], otherHas = networks.some((network) => !network[name]);
  return why && otherHas ? `${why.slice(0, -1)}; choose the other network.` : why;
}

function make(kind, ...parts) {
  const made = document.createElement(kind);
  made.append(...parts);
  return made;
}

function classed(name, made) {
  made.className = name;
  return made;
}

// A bar as long as the share of the largest score, 1.
function track(share) {
  const made = classed("track", make("span"));
  made.style.setProperty("--share", Math.min(share, 1));
  return made;
}
