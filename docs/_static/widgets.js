// Settings to slide and choose, and the answer to them, looked up in the grid that stands in the page (docs/_ext/widgets.py).
addEventListener("DOMContentLoaded", () => {
  const element = (tag, attributes = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), attributes);
    made.append(...children);
    return made;
  };

  const widget = (root) => {
    const grid = JSON.parse(root.querySelector("script").textContent);
    const at = grid.axes.map((axis) => axis.start);
    const form = element("form", { className: "nsightkit-settings" });
    form.addEventListener("submit", (event) => event.preventDefault());
    const said = element("output", { className: "nsightkit-said" });
    const body = element("tbody");
    const items = element("table", {}, element("caption", { textContent: grid.items }), body);

    const show = () => {
      const row = grid.rows[at.reduce((place, choice, i) => place * grid.axes[i].choices.length + choice, 0)];
      const words = row.length - 2 * grid.names.length;
      said.value = grid.sentence.replace(/\{(\d)\}/g, (_, word) => grid.texts[row[word]]);
      body.replaceChildren(
        ...grid.names.flatMap((name, i) => {
          const [text, length] = row.slice(words + 2 * i, words + 2 * i + 2);
          if (!grid.texts[text]) return [];
          const bar = element("div", { className: "nsightkit-bar" });
          bar.style.width = `${length}%`;
          const head = element("th", { scope: "row", textContent: name });
          return [element("tr", {}, head, element("td", { textContent: grid.texts[text] }), element("td", { ariaHidden: "true" }, bar))];
        }),
      );
    };

    grid.axes.forEach((axis, i) => {
      const id = `${root.id}-${i}`;
      const control = axis.slides
        ? element("input", { type: "range", min: 0, max: axis.choices.length - 1, step: 1, id })
        : element("select", { id }, ...axis.choices.map((text, value) => element("option", { value, textContent: text })));
      control.value = axis.start;
      const chosen = element("span", { className: "nsightkit-chosen", ariaHidden: "true" });
      const take = () => {
        at[i] = Number(control.value);
        if (!axis.slides) return;
        chosen.textContent = axis.choices[at[i]];
        control.setAttribute("aria-valuetext", axis.choices[at[i]]);
      };
      control.addEventListener("input", () => {
        take();
        show();
      });
      take();
      const label = element("label", { htmlFor: id, textContent: axis.label });
      form.append(element("div", {}, label, control, ...(axis.slides ? [chosen] : [])));
    });
    show();
    root.querySelector(":scope > div").hidden = true;
    root.append(form, said, items);
  };

  document.querySelectorAll(".nsightkit-widget").forEach(widget);
});
