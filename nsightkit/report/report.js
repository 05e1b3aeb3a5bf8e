
// Tables that sort and filter, and gaps that the timeline shows. Without it the page is whole, only longer.
(() => {
  "use strict";

  function part(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  const plural = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
  const sorter = new Intl.Collator("en", { numeric: true });

  function listing(table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const first = Number(table.dataset.first);
    const words = rows.map((row) => row.textContent.toLowerCase());
    let all = rows.length <= first + 3; // a button for two more rows is not worth it
    let wanted = "";

    const said = part("span", { className: "count" });
    said.setAttribute("role", "status");
    const more = part("button", { type: "button", className: "more", onclick: () => { all = !all; show(); } });

    function show() {
      const found = new Set(rows.filter((_, i) => words[i].includes(wanted)));
      let shown = 0;
      for (const row of body.rows) {
        const here = found.has(row) && (all || shown < first);
        row.hidden = !here;
        if (here) shown++;
      }
      const of = wanted ? `${plural(found.size, "row")} of ${rows.length.toLocaleString("en")} found` : plural(rows.length, "row");
      said.textContent = shown < found.size ? `${of}, ${shown} shown` : of;
      more.hidden = found.size <= first || rows.length <= first + 3;
      more.textContent = all ? `Show ${first} rows` : `Show all ${found.size.toLocaleString("en")} rows`;
      more.setAttribute("aria-expanded", String(all));
    }

    function sort(head, column) {
      const down = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : head.dataset.sort === "number";
      for (const other of table.tHead.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const number = head.dataset.sort === "number";
      const keyed = rows.map((row, i) => ({ row, i, v: number && value(row) !== "" ? Number(value(row)) : value(row) }));
      keyed.sort((a, b) => {
        // What is not known comes last, whichever way.
        if ((a.v === "") !== (b.v === "")) return a.v === "" ? 1 : -1;
        const order = number ? a.v - b.v : sorter.compare(a.v, b.v);
        return (down ? -order : order) || a.i - b.i;
      });
      body.append(...keyed.map(({ row }) => row));
      show();
    }

    // Cells under a head that spans two rows of heads come first; those of the lower row follow.
    const heads = [...table.tHead.rows[0].cells].filter((cell) => cell.scope !== "colgroup").concat(...[...table.tHead.rows].slice(1).map((row) => [...row.cells]));
    heads.forEach((head, column) => {
      if (!head.dataset.sort) return;
      const button = part("button", { type: "button", className: "sort", onclick: () => sort(head, column) }, ...head.childNodes);
      if (head.ariaLabel) {
        button.ariaLabel = head.ariaLabel;
        head.removeAttribute("aria-label");
      }
      head.append(button);
    });

    const tools = part("div", { className: "tools" });
    if (rows.length > 8) {
      const input = part("input", { type: "search", autocomplete: "off", spellcheck: false,
        oninput: () => { wanted = input.value.trim().toLowerCase(); show(); } });
      input.ariaLabel = `Filter: ${table.dataset.what}`;
      tools.append(part("label", {}, "Filter", input));
    }
    tools.append(said);
    if (rows.length > 8) table.closest(".listing").prepend(tools);
    table.closest(".scroll").after(more);
    show();
  }

  for (const table of document.querySelectorAll("table[data-first]")) listing(table);

  const timeline = document.querySelector("nsightkit-timeline");
  for (const button of document.querySelectorAll("button.reveal")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const { trace, start, end } = button.dataset;
      if (timeline.rows) timeline.reveal(Number(trace), Number(start), Number(end));
    });
  }

})();
