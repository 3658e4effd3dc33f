// Making and updating elements. Data always becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Return a new element: `make("a", {href: "#", class: "x", onclick: go}, "text", child)`. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else set(element, name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set an attribute, touching the page only if it differs; null and false remove it. */
export function set(element, name, value) {
  const wanted = value === true ? "" : value;
  if (wanted === null || wanted === undefined || wanted === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(wanted)) element.setAttribute(name, wanted);
}

/** Set the text of an element, touching the page only if it differs. */
export function write(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/**
 * Make a container hold one child an item, in the items' order. A child lives as long as its key is there, so that
 * focus and open details stay. `build` returns a child; its `update` property, a function, is called with the item.
 */
export function keep(container, items, keyOf, build) {
  const known = new Map([...container.children].map((child) => [child.dataset.key, child]));
  let place = container.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    const child = known.get(key) ?? build(item);
    child.dataset.key = key;
    known.delete(key);
    if (child === place) place = place.nextElementSibling;
    else container.insertBefore(child, place);
    child.update?.(item);
  }
  for (const gone of known.values()) gone.remove();
}

/** Return a sparkline; its `draw` property takes the values, oldest first. The number beside it is its text. */
export function sparkline(width = 120, height = 26) {
  const svg = document.createElementNS(SVG, "svg");
  const area = document.createElementNS(SVG, "path");
  const line = document.createElementNS(SVG, "path");
  set(svg, "viewBox", `0 0 ${width} ${height}`);
  set(svg, "class", "spark");
  set(svg, "aria-hidden", "true");
  set(svg, "preserveAspectRatio", "none");
  set(area, "class", "area");
  set(line, "class", "line");
  svg.append(area, line);
  svg.draw = (values, slots = 60) => {
    const path = outline(values, slots, width, height);
    set(line, "d", path.line);
    set(area, "d", path.area);
  };
  return svg;
}

function outline(values, slots, width, height) {
  const shown = values.slice(-slots);
  const top = Math.max(...shown, 1e-9);
  const step = width / (slots - 1);
  const left = width - (shown.length - 1) * step;
  const points = shown.map((value, index) => {
    const y = height - 2 - (value / top) * (height - 4);
    return `${(left + index * step).toFixed(1)},${y.toFixed(1)}`;
  });
  if (!points.length) return { line: "", area: "" };
  const line = `M${points.join("L")}`;
  return { line, area: `${line}L${width},${height}L${left.toFixed(1)},${height}Z` };
}
