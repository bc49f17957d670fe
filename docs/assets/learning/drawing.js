// Elements, controls and arrows of the page "Watch a layer learn".

export const number = (x) => (Math.abs(x) < 0.005 ? 0 : x).toFixed(2).replace("-", "−");

function filled(made, attributes, parts) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...parts);
  return made;
}

export const make = (kind, attributes = {}, ...parts) => filled(document.createElement(kind), attributes, parts);
export const draw = (kind, attributes = {}, ...parts) => filled(document.createElementNS("http://www.w3.org/2000/svg", kind), attributes, parts);

export function button(label, action) {
  const made = make("button", { type: "button" }, label);
  made.addEventListener("click", action);
  return made;
}

export function choice(label, values, value, write) {
  const select = make("select", {}, ...values.map((each) => make("option", { value: each }, String(each))));
  select.value = value;
  select.addEventListener("change", () => write(select.value));
  return make("label", {}, `${label} `, select);
}

// An arrow from the origin; the plane's second axis points up, the screen's down. `size` is the length of its head.
export function arrow(name, [x, y], width, size = 0.09) {
  const long = Math.hypot(x, y) || 1, head = size + width, [u, v] = [x / long, y / long], side = 0.55 * head;
  const [a, b] = [x - head * u, y - head * v];
  const points = [[x, y], [a - side * v, b + side * u], [a + side * v, b - side * u]].map(([p, q]) => `${p},${-q}`).join(" ");
  return draw("g", { class: name }, draw("line", { x1: 0, y1: 0, x2: a, y2: -b, "stroke-width": width }), draw("polygon", { points }));
}
