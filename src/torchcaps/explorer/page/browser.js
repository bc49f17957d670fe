// Answers the page's questions in the browser (ask.js sends them to a server; on a page without one, this file takes its place). The answers equal those of
// questions.Questions. `props.browser` describes the network, see static.py; weights.safetensors holds its weights.
import { props } from "./about.js";
import { $, decodeBytes, encode } from "./core.js";

// ---- weights: the safetensors format, a JSON header followed by the numbers ----

async function loadWeights() {
  const answer = await fetch("weights.safetensors").catch(() => null);
  if (!answer?.ok) throw new Error("The weights of the network could not be loaded.");
  const buffer = await received(answer.body), size = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  delete header.__metadata__;
  return Object.fromEntries(Object.entries(header).map(([name, { dtype, shape, data_offsets: [start, end] }]) => {
    const bytes = buffer.slice(8 + size + start, 8 + size + end);
    const values = dtype === "F16" ? fromHalf(new Uint16Array(bytes)) : new Float32Array(bytes);
    return [name, Object.assign(values, { shape })];
  }));
}

// Reads a stream to its end, and says on the page how much has come.
async function received(stream) {
  const all = new Uint8Array(props.browser.bytes), place = $(".loading"), mib = (bytes) => (bytes / 2 ** 20).toFixed(1);
  const reader = stream.getReader();
  let size = 0;
  for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
    all.set(value, size);
    size += value.length;
    place.textContent = `Loading the network: ${mib(size)} of ${mib(all.length)} MiB. You can draw already.`;
  }
  place.textContent = "";
  return all.buffer;
}

function fromHalf(bits) {
  return Float32Array.from(bits, (half) => {
    const sign = half & 0x8000 ? -1 : 1, exponent = (half >> 10) & 0x1f, fraction = half & 0x3ff;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
  });
}

const weightsLoaded = loadWeights();
weightsLoaded.catch(() => null); // the first question reports the error

// ---- layers. Maps are { data, channels, height, width }, channel after channel ----

function convolve({ data, channels, height, width }, weight, bias, stride) {
  const [outputs, , k] = weight.shape;
  const [h, w] = [height, width].map((side) => Math.floor((side - k) / stride) + 1);
  const made = new Float32Array(outputs * h * w);
  for (let o = 0, at = 0; o < outputs; o++) {
    const out = made.subarray(o * h * w, (o + 1) * h * w).fill(bias ? bias[o] : 0);
    for (let c = 0; c < channels; c++)
      for (let i = 0; i < k; i++)
        for (let j = 0; j < k; j++) {
          const factor = weight[at++];
          for (let y = 0; y < h; y++) {
            let from = (c * height + y * stride + i) * width + j;
            for (let x = y * w; x < (y + 1) * w; x++, from += stride) out[x] += factor * data[from];
          }
        }
  }
  return { data: made, channels: outputs, height: h, width: w };
}

// Layer normalisation over the channels at each position.
function normalise({ data, channels, ...sizes }, weight, bias, eps) {
  const places = data.length / channels;
  for (let p = 0; p < places; p++) {
    let mean = 0, square = 0;
    for (let n = p; n < data.length; n += places) mean += data[n] / channels;
    for (let n = p; n < data.length; n += places) square += (data[n] - mean) ** 2 / channels;
    const factor = 1 / Math.sqrt(square + eps);
    for (let c = 0, n = p; c < channels; c++, n += places) data[n] = (data[n] - mean) * factor * weight[c] + bias[c];
  }
  return { data, channels, ...sizes };
}

function linear(input, weight, bias) {
  const made = Float32Array.from(bias);
  for (let d = 0, at = 0; d < made.length; d++)
    for (let k = 0; k < input.length; k++) made[d] += input[k] * weight[at++];
  return made;
}

function squashInto(vector, eps) {
  const n = vector.reduce((sum, x) => sum + x * x, 0), factor = n / (1 + n) / Math.sqrt(n + eps);
  vector.forEach((x, d) => (vector[d] = factor * x));
}

// ---- the network ----

// Returns the primary capsules, capsule i = (type·H + y)·W + x, and their grid.
function primary(pixels, weights) {
  const { backbone, primary } = props.browser, [channels, height, width] = props.networks[0].shape;
  let maps = { data: Float32Array.from(pixels, (byte) => byte / 255), channels, height, width };
  for (const { kind, name, stride, eps } of backbone) {
    const [weight, bias] = [weights[`${name}.weight`], weights[`${name}.bias`]];
    if (kind === "convolution") maps = convolve(maps, weight, bias, stride);
    else if (kind === "norm") maps = normalise(maps, weight, bias, eps);
    else maps.data.forEach((x, n) => (maps.data[n] = Math.max(x, 0)));
  }
  const { data, height: h, width: w } = convolve(maps, weights[`${primary.name}.weight`], weights[`${primary.name}.bias`], primary.stride);
  const places = h * w, K = primary.dim, types = data.length / K / places, poses = new Float32Array(data.length);
  for (let i = 0; i < types * places; i++) {
    const pose = poses.subarray(i * K, (i + 1) * K), [type, place] = [Math.floor(i / places), i % places];
    for (let k = 0; k < K; k++) pose[k] = data[(type * K + k) * places + place];
    squashInto(pose, primary.eps);
  }
  return { poses, grid: [types, h, w] };
}

// Dynamic routing: returns coupling and agreement [i·J + j], and the capsules, of each iteration.
function route(poses, weight, iterations, eps) {
  const [J, D, K, I] = weight.shape, votes = new Float32Array(I * J * D), rounds = [];
  for (let n = 0, at = 0; n < J * D; n++)
    for (let k = 0; k < K; k++)
      for (let i = 0; i < I; i++) votes[i * J * D + n] += weight[at++] * poses[i * K + k];
  const logits = new Float32Array(I * J);
  for (let t = 0; t < iterations; t++) {
    const coupling = new Float32Array(I * J), capsules = Array.from({ length: J }, () => new Float64Array(D));
    for (let i = 0; i < I; i++) {
      const row = logits.subarray(i * J, (i + 1) * J), largest = Math.max(...row);
      const powers = Array.from(row, (b) => Math.exp(b - largest)), total = powers.reduce((a, b) => a + b);
      for (let j = 0; j < J; j++) {
        const share = (coupling[i * J + j] = powers[j] / total);
        for (let d = 0; d < D; d++) capsules[j][d] += share * votes[(i * J + j) * D + d];
      }
    }
    capsules.forEach((capsule) => squashInto(capsule, eps));
    const agreement = logits.map((_, n) => capsules[n % J].reduce((sum, x, d) => sum + votes[n * D + d] * x, 0));
    agreement.forEach((a, n) => (logits[n] += a));
    rounds.push({ coupling, agreement, capsules });
  }
  return rounds;
}

// Returns the rounds of an image, and the grid of its input capsules; 0 iterations: the network's own number.
function routed(pixels, iterations, weights) {
  const { name, iterations: own, eps } = props.browser.routing, { poses, grid } = primary(pixels, weights);
  return { rounds: route(poses, weights[name], iterations || own, eps), grid };
}

// Returns pixels 0..1, decoded from one capsule; all other capsules are zero.
function decoded(capsule, j, weights) {
  const { decoder } = props.browser, [J, D] = [props.networks[0].classes.length, capsule.length];
  let values = new Float32Array(J * D);
  values.set(capsule, j * D);
  decoder.forEach((name, n) => {
    values = linear(values, weights[`${name}.weight`], weights[`${name}.bias`]);
    values = values.map((x) => (n < decoder.length - 1 ? Math.max(x, 0) : 1 / (1 + Math.exp(-x))));
  });
  return values;
}

// ---- answers ----

const lengths = (capsules) => capsules.map((v) => Math.sqrt(v.reduce((sum, x) => sum + x * x, 0) + props.browser.lengthEps));
// As ops.labels.grade_scores: differences of the nearest decreasing sequence of thresholds.
function grades(values) {
  const above = values.slice(1).map((x) => Math.min(Math.max(x, 0), 1));
  const mean = (i, j) => above.slice(i, j + 1).reduce((a, b) => a + b) / (j + 1 - i);
  const largest = (i, k) => Math.max(...above.slice(k).map((_, n) => mean(i, k + n)));
  const edges = [1, ...above.map((_, k) => Math.min(...above.slice(0, k + 1).map((_, i) => largest(i, k)))), 0];
  return edges.slice(1).map((x, k) => edges[k] - x);
}
// As Ordinal.predict_classes: the number of grades whose scores, added from the lowest grade on, stay below one half.
function median(scores) {
  let sum = 0;
  return scores.slice(0, -1).filter((x) => (sum += x) < 0.5).length;
}
const pictureOf = (values) => ({ whole: encode(values.map(toByte)), apart: [] });
const toByte = (value) => Math.round(255 * Math.min(Math.max(value, 0), 1));

// As calibration.Calibration.caveats.
function caveats(scores, best, pixels, drawn) {
  const { score: least, error: most } = props.browser.calibration, name = props.networks[0].score;
  const score = scores[best], reasons = [];
  const next = Math.max(...scores.filter((_, j) => j !== best)), two = (x) => x.toFixed(2);
  const off = pixels.reduce((sum, byte, n) => sum + (byte / 255 - drawn[n]) ** 2, 0);
  if (score < least) reasons.push(`${name} ${two(score)} is below ${two(least)}`);
  if (next >= props.browser.near * score) reasons.push(`the runner-up has ${name} ${two(next)}`);
  if (most !== null && off > most) reasons.push(`the redrawn image is off by ${off.toFixed(1)} (limit ${most.toFixed(1)})`);
  return reasons;
}

// As state.describe_routing, for all classes.
function describeRouting(rounds, [types, h, w]) {
  const places = h * w, J = rounds[0].capsules.length, uniform = 1 / J, reach = Math.min(4 * uniform, Math.max(uniform, 1 - uniform)), classes = Array.from({ length: J }, (_, j) => j);
  const maps = rounds.map(({ coupling }) => classes.map((j) => Array.from({ length: places }, (_, place) => {
    let sum = 0;
    for (let type = 0; type < types; type++) sum += coupling[(type * places + place) * J + j];
    return sum / types;
  })));
  const level = (c) => Math.round(128 + 127 * Math.sign(c - uniform) * Math.sqrt(Math.min(Math.abs(c - uniform) / reach, 1)));
  return {
    classes, size: [h, w], maps: maps.map((row) => row.map((map) => encode(map.map(level)))),
    means: maps.map((row) => row.map((map) => (map.reduce((a, b) => a + b) / places).toFixed(4))),
    scores: rounds.map(({ capsules }) => lengths(capsules)), uniform, reach, largest: maps.map((row) => Math.max(...row.flat())), inSpace: true, inputs: "primary capsules",
  };
}

const ANSWERS = {
  look({ pixels: text, iterations }, weights) {
    const pixels = decodeBytes(text), { rounds, grid } = routed(pixels, iterations, weights);
    const capsules = rounds.at(-1).capsules.map((capsule) => [...capsule]), { isOrdinal } = props.browser;
    const scores = isOrdinal ? grades(lengths(capsules)) : lengths(capsules);
    const best = isOrdinal ? median(scores) : scores.indexOf(Math.max(...scores)), drawn = decoded(capsules[best], best, weights);
    return {
      scores, present: [best], caveats: caveats(scores, best, pixels, drawn), capsules,
      routing: describeRouting(rounds, grid), decoded: pictureOf(drawn),
    };
  },
  votes({ pixels, iterations, cell: [y, x] }, weights) {
    const { rounds, grid: [types, h, w] } = routed(decodeBytes(pixels), iterations, weights), J = rounds[0].capsules.length;
    const ofCell = (numbers) => Array.from({ length: types }, (_, type) => {
      const at = ((type * h + y) * w + x) * J;
      return [...numbers.subarray(at, at + J)];
    });
    return { agreement: rounds.map((each) => ofCell(each.agreement)), coupling: rounds.map((each) => ofCell(each.coupling)) };
  },
  decode({ classes: [j], poses: [pose] }, weights) {
    return pictureOf(decoded(pose, j, weights));
  },
  pick({ index }) {
    const { pixels, labels } = props.browser, most = pixels.length - 1;
    if (!(index in pixels)) throw new Error(`The number of a test image must be 0 to ${most}, got ${index}.`);
    return { pixels: pixels[index], label: labels[index] };
  },
  // Draws the file's image on a black ground of the network's size, in grey for one channel. Numbers of the network's
  // range become 0 to 255; a canvas has 8 bits, so files and ranges of more bits are refused.
  async read({ name, data }) {
    const [channels, height, width] = props.networks[0].shape, bytes = decodeBytes(data);
    const { fit, scale: range } = props.browser, [low, high] = range ?? [0, 255];
    if (range && (high > 255 || bitsOf(bytes) > 8))
      throw new Error(`This page reads images of 8 bits, but the network takes numbers from ${low} to ${high} of “${name}”.`);
    const image = await createImageBitmap(new Blob([bytes])).catch(() => null);
    if (!image) throw new Error(`“${name}” could not be read as an image.`);
    const canvas = Object.assign(document.createElement("canvas"), { width, height }), on = canvas.getContext("2d");
    const scale = Math.min(width / image.width, height / image.height);
    const [w, h] = fit === "stretch" ? [width, height] : [image.width * scale, image.height * scale];
    on.fillRect(0, 0, width, height);
    on.imageSmoothingQuality = "high";
    on.drawImage(image, (width - w) / 2, (height - h) / 2, w, h);
    const rgba = on.getImageData(0, 0, width, height).data, size = height * width;
    const pixels = Array.from({ length: channels * size }, (_, n) => {
      const at = 4 * (n % size), grey = 0.299 * rgba[at] + 0.587 * rgba[at + 1] + 0.114 * rgba[at + 2];
      const value = channels === 1 ? grey : rgba[at + Math.floor(n / size)];
      return Math.round(Math.min(Math.max((255 * (value - low)) / (high - low), 0), 255));
    });
    return { pixels: encode(pixels), changes: [] };
  },
};

// Bits of a number in an image file: those in the header of a PNG file; other files that browsers read have 8.
function bitsOf(bytes) {
  const isPng = [0x89, 0x50, 0x4e, 0x47].every((byte, n) => bytes[n] === byte);
  return isPng ? bytes[24] : 8;
}

// Images are picked and read without the weights, so they are shown while these load.
export async function ask(name, question) {
  const answer = ANSWERS[name];
  return answer(question, answer.length > 1 ? await weightsLoaded : null);
}
