// What scrolls sideways must be reachable with the keyboard (the theme does this for code and for notebook outputs).
addEventListener("DOMContentLoaded", () => {
  const regions = document.querySelectorAll(
    ".output_subarea, .cell_output > .output, .nsightkit-provenance, .nsightkit-figure",
  );
  const update = () =>
    regions.forEach((region) => {
      if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
      else region.removeAttribute("tabindex");
    });
  update();
  addEventListener("resize", update);
  addEventListener("load", update);
});

// Tables of results sort by a click on a heading. Shown values are rounded, with units: they are read back for it.
const UNITS = {
  ns: 1e-9, "µs": 1e-6, "μs": 1e-6, us: 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600,
  B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, kB: 1e3, MB: 1e6, GB: 1e9, "%": 0.01,
};
const valueOf = (text) => {
  const found = /^([+\-−]?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*([^\d\s]*)$/i.exec(text.trim());
  if (!found || (found[2] && !(found[2] in UNITS))) return NaN;
  return parseFloat(found[1].replaceAll(",", "").replace("−", "-")) * (UNITS[found[2]] ?? 1);
};

const sortable = (table) => {
  const body = table.tBodies[0];
  const heads = table.tHead?.rows.length === 1 ? [...table.tHead.rows[0].cells] : [];
  const plain = body && [...body.rows].every((row) => row.cells.length === heads.length);
  if (!plain || body.rows.length < 3) return;
  heads.forEach((head, column) => {
    if (!head.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "nsightkit-sort";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const keyed = [...body.rows].map((row) => [row, row.cells[column].textContent.trim()]);
      const numeric = keyed.some(([, text]) => !Number.isNaN(valueOf(text)));
      const compare = (a, b) => {
        if (!numeric) return b.localeCompare(a);
        const [x, y] = [valueOf(a), valueOf(b)];
        // What has no number stays below, whichever way the others go.
        if (Number.isNaN(x) || Number.isNaN(y)) return (Number.isNaN(x) - Number.isNaN(y)) * (up ? -1 : 1);
        return y - x;
      };
      keyed.sort(([, a], [, b]) => compare(a, b) * (up ? -1 : 1));
      body.append(...keyed.map(([row]) => row));
    });
  });
};
addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".output_subarea table, .cell_output .text_html table").forEach(sortable);
});

// On a phone a table of prose has no room for its columns: each row becomes a block, and each cell names its column.
const stackable = (table) => {
  const heads = table.tHead?.rows.length === 1 ? [...table.tHead.rows[0].cells] : [];
  if (heads.length < 3) return;
  table.classList.add("nsightkit-stack");
  // A block is no longer a table to a screen reader unless it says so.
  const roles = [["table", [table]], ["rowgroup", [table.tHead, ...table.tBodies]], ["row", table.rows], ["columnheader", heads]];
  roles.forEach(([role, parts]) => [...parts].forEach((part) => part.setAttribute("role", role)));
  [...table.tBodies].flatMap((body) => [...body.rows]).forEach((row) => {
    [...row.cells].forEach((cell, column) => {
      cell.setAttribute("role", "cell");
      if (column && cell.textContent.trim()) cell.dataset.column = heads[column]?.textContent.trim() ?? "";
    });
  });
};
addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".pst-scrollable-table-container > table.table, .cell_output table.table").forEach(stackable);
});

// The theme's buttons that open a branch of the side bar show an icon only.
document.addEventListener("DOMContentLoaded", () => {
  for (const button of document.querySelectorAll(".bd-sidebar-primary summary")) {
    button.setAttribute("aria-label", `Pages below ${button.closest("li")?.querySelector("a")?.textContent.trim() ?? ""}`);
  }
});
