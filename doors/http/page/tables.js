// Tables that are updated in place, so that what has the focus keeps it.

import { keep, make, set, write } from "./dom.js";

/** Return a section with a heading; what else is in it is appended. */
export function section(title, ...children) {
  const id = `section-${title.toLowerCase().replaceAll(" ", "-")}`;
  return make("section", { "aria-labelledby": id }, make("h2", { id }, title), ...children);
}

/**
 * Return a table. A column is {title, kind?, show(cell, item)}; `show` is called again and again with the same cell.
 * Its `update` property takes the items, and how many more there are; without any, the `empty` element is there
 * instead.
 */
export function table({ label, columns, key, empty }) {
  const heads = columns.map(({ title, kind }) => make("th", { scope: "col", class: kind }, title));
  const body = make("tbody");
  const grid = make("table", { "aria-label": label }, make("thead", {}, make("tr", {}, ...heads)), body);
  const more = make("p", { class: "faint" });
  const frame = make("div", { class: "frame" }, grid, empty, more);
  frame.update = (items, omitted = 0) => {
    set(more, "hidden", !omitted);
    write(more, `And ${omitted} more.`);
    set(grid, "hidden", !items.length);
    set(empty, "hidden", items.length > 0);
    keep(body, items, key, () => row(columns));
  };
  return frame;
}

function row(columns) {
  const cells = columns.map(({ title, kind }) => make("td", { class: kind, "data-title": title }));
  const line = make("tr", {}, ...cells);
  line.update = (item) => columns.forEach((column, index) => column.show(cells[index], item));
  return line;
}

/** Return a column of text. */
export function text(title, words, kind) {
  return { title, kind, show: (cell, item) => write(cell, words(item)) };
}

/** Return a column of numbers, aligned right. */
export const number = (title, words) => text(title, words, "number");

/** Return a column with what `build` returns for a cell, updated by its `update` property. */
export function built(title, build, kind) {
  return {
    title,
    kind,
    show(cell, item) {
      if (!cell.firstElementChild) cell.append(build());
      cell.firstElementChild.update(item);
    },
  };
}
