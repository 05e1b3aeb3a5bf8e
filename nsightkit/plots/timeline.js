// <nsightkit-timeline>: a timeline that zooms and pans, from data packed by nsightkit/plots/_interactive.py.
//
// No library, no request. Text of a trace reaches the page through textContent and fillText only. The element keeps
// its static figures as children: they show without scripts, before the data is unpacked, and when anything fails.
(() => {
  "use strict";
  const TAG = "nsightkit-timeline";
  if (customElements.get(TAG)) return; // a page may bring this program once a figure

  // ---- Unpacking -------------------------------------------------------------------------------------------------

  async function unpack(text) {
    const binary = atob(text);
    const packed = new Uint8Array(binary.length);
    for (let i = 0; i < packed.length; i++) packed[i] = binary.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    const size = new DataView(bytes.buffer).getUint32(0, true);
    const data = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
    data.groupOfName = Int32Array.from(data.names, (name) => name[1]);
    let at = 4 + size;
    for (const trace of data.traces) {
      const n = trace.lanes.flat().reduce((sum, [, size]) => sum + size, 0);
      // A column is stored as all lowest bytes, then all second bytes, …; doubles hold integers up to 2**53.
      const [gap, length, extra, more, name] = trace.widths.map((width) => {
        const column = new Float64Array(n);
        for (let plane = 0, weight = 1; plane < width; plane++, weight *= 256)
          for (let i = 0; i < n; i++) column[i] += bytes[at++] * weight;
        return column;
      });
      const unfold = (v) => (v % 2 ? -(v + 1) / 2 : v / 2);
      let from = 0;
      trace.lanes = trace.lanes.map((levels) =>
        levels.map(([cell, size]) => {
          const level = { cell, size, start: new Float64Array(size), end: new Float64Array(size),
            busy: new Float64Array(size), reach: new Float64Array(size),
            count: new Uint32Array(size), name: new Uint32Array(size) };
          let before = 0;
          let reach = -Infinity;
          for (let i = 0, k = from; i < size; i++, k++) {
            level.start[i] = before + unfold(gap[k]);
            before = level.end[i] = level.start[i] + length[k];
            level.busy[i] = length[k] + unfold(extra[k]);
            level.count[i] = more[k] + 1;
            level.name[i] = name[k];
            // Events may overlap, so their ends need not ascend, but the latest end so far does.
            level.reach[i] = reach = Math.max(reach, before);
          }
          from += size;
          return level;
        }),
      );
    }
    return data;
  }

  // First index whose value is above `x` in an ascending array.
  function above(array, x) {
    let low = 0;
    let high = array.length;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (array[middle] > x) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // ---- Words -----------------------------------------------------------------------------------------------------

  const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
  const unitOf = (ns) => UNITS.find(([scale]) => Math.abs(ns) >= scale) || UNITS[3];

  function duration(ns) {
    const [scale, unit] = unitOf(ns);
    const value = ns / scale;
    const digits = scale === 1 ? 0 : value >= 100 ? 1 : value >= 10 ? 2 : 3;
    return `${value.toFixed(digits)} ${unit}`;
  }

  // A point in time to the nanosecond, in groups of three digits.
  function moment(ns) {
    const [scale, unit] = unitOf(ns);
    const digits = Math.round(Math.log10(scale));
    const [whole, part = ""] = (ns / scale).toFixed(digits).split(".");
    const grouped = part.replace(/(\d{3})(?=\d)/g, "$1\u202f");
    return `${whole}${part ? "." + grouped : ""} ${unit}`;
  }

  const percent = (share) => {
    const p = 100 * share;
    return p === 0 ? "0 %" : p < 0.1 ? "< 0.1 %" : `${p.toFixed(p < 99.95 ? 1 : 0)} %`;
  };

  // What fits in a box: a kernel's own name, without return type, namespaces and arguments.
  function brief(name) {
    const plain = name.replace(/\(anonymous namespace\)::|<unnamed>::/g, "");
    const head = plain.split(/[<(]/, 1)[0].trim();
    const own = head.split(/\s+/).pop().split("::").pop();
    // CUTLASS calls them all Kernel or Kernel2, and their first template argument what they are.
    const inner = /^(device_)?kernel2?$/i.test(own) && /<\s*([\w:]+)/.exec(plain);
    return (inner ? inner[1].split("::").pop() : own) || plain;
  }

  // ---- Colours ---------------------------------------------------------------------------------------------------

  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const mixed = (rgb, other, share) => rgb.map((v, i) => v + (other[i] - v) * share);
  const css = (rgb, alpha = 1) => `rgb(${rgb.map(Math.round).join(" ")} / ${alpha})`;

  // A colour's shade for this page, on which writing has a contrast of 4.5:1: dark with white letters on a light page,
  // light with black letters on a dark one.
  function shade(hex, dark) {
    const base = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const letters = dark ? 0.006 : 1;
    for (let share = 0; share < 1; share += 0.04) {
      const tried = mixed(base, dark ? [255, 255, 255] : [0, 0, 0], share);
      if (contrast(luminance(tried), letters) >= 4.5) return tried;
    }
    return base;
  }

  // ---- The page's parts ------------------------------------------------------------------------------------------

  function part(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(properties)) {
      if (key in element && key !== "role") element[key] = value;
      else element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  }

  const STYLE = `
    :host { display: block; contain: layout style; margin: 1rem 0; color: inherit; font-size: 0.9rem; line-height: 1.4; }
    * { box-sizing: border-box; }
    .bar { display: flex; flex-wrap: wrap; align-items: center; gap: 0.5rem 0.75rem; margin-bottom: 0.5rem; }
    .bar strong { margin-right: auto; font-size: 1rem; overflow-wrap: anywhere; }
    .group { display: inline-flex; }
    button, select { font: inherit; color: inherit; min-height: 2rem; min-width: 2rem; padding: 0 0.7rem;
      background: color-mix(in srgb, currentColor 5%, transparent); cursor: pointer;
      border: 1px solid color-mix(in srgb, currentColor 55%, transparent); border-radius: 0.4rem; }
    select { max-width: 100%; padding: 0 0.4rem; }
    select option { color: CanvasText; background: Canvas; }
    label { display: inline-flex; align-items: center; gap: 0.4rem; max-width: 100%; }
    .group button:not(:first-child) { border-left-width: 0; border-top-left-radius: 0; border-bottom-left-radius: 0; }
    .group button:not(:last-child) { border-top-right-radius: 0; border-bottom-right-radius: 0; }
    button:hover { background: color-mix(in srgb, currentColor 14%, transparent); }
    button[aria-pressed="true"] { background: var(--accent); border-color: var(--accent); color: var(--on-accent); }
    :is(button, select, canvas, summary):focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
    canvas:focus-visible { outline-offset: -2px; } /* a page may cut off what sticks out of an output */
    .stage { position: relative; }
    canvas { display: block; width: 100%; touch-action: pan-y; cursor: grab; border-radius: 0.25rem; }
    canvas.dragged { cursor: grabbing; }
    .tip { position: absolute; pointer-events: none; max-width: min(24rem, 90%); padding: 0.35rem 0.6rem; z-index: 2;
      border-radius: 0.4rem; background: var(--tip); color: var(--on-tip); font-size: 0.82rem; overflow-wrap: anywhere;
      box-shadow: 0 2px 8px rgb(0 0 0 / 0.3); }
    .tip[hidden] { display: none; }
    .name { font-weight: 600; display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 4;
      overflow: hidden; unicode-bidi: isolate; overflow-wrap: anywhere; }
    .said { min-height: 4.9em; margin: 0.4rem 0 0; padding: 0.35rem 0.7rem; border-left: 3px solid var(--accent);
      background: color-mix(in srgb, currentColor 5%, transparent); overflow-wrap: anywhere; }
    .legend { display: flex; flex-wrap: wrap; gap: 0.1rem 0.9rem; list-style: none; margin: 0.4rem 0 0; padding: 0; }
    .legend li { display: inline-flex; align-items: center; gap: 0.35rem; margin: 0; overflow-wrap: anywhere; }
    .legend i { flex: none; width: 0.8rem; height: 0.8rem; border-radius: 0.15rem; }
    .note, details { margin: 0.4rem 0 0; font-size: 0.85rem; }
    summary { cursor: pointer; min-height: 1.5rem; width: max-content; max-width: 100%; }
    dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 0.9rem; margin: 0.3rem 0 0; }
    dd { margin: 0; }
    @media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dt { font-weight: 600; } }`;

  const HELP = [
    ["← →", "move"],
    ["+ −", "zoom in and out; Home shows everything"],
    ["↑ ↓", "choose a row"],
    ["N, P", "next and previous event of the row; Enter zooms to it"],
    ["drag, double-click", "move, zoom to an event; Ctrl or ⌘ with the wheel zooms, and so does the wheel alone after a click"],
    ["touch", "drag to move, pinch to zoom, tap an event to read it"],
    ["strip on top", "the whole window: drag the frame, or press where to look"],
  ];

  const HINT = "Point at, tap or choose an event to read about it. The wheel zooms after a click on the picture, " +
    "and at any time with Ctrl or ⌘.";
  const MAP = 26; // height of the strip that shows the whole window
  const AXIS = 22;
  const LEAST_NS = 20; // closer than this there is nothing to see

  class Timeline extends HTMLElement {
    connectedCallback() {
      if (this.started) return;
      this.started = true;
      // Written by the parser, the element is here before its children are.
      if (document.readyState === "loading") addEventListener("DOMContentLoaded", () => this.begin(), { once: true });
      else this.begin();
    }

    async begin() {
      try {
        const source = this.querySelector('script[type="text/plain"]');
        this.data = await unpack(source.textContent.trim());
        source.remove(); // megabytes that nothing needs any more
        this.build();
      } catch (error) {
        // A slot shows the element's children again: the static figures.
        if (this.shadowRoot) this.shadowRoot.replaceChildren(document.createElement("slot"));
        console.warn(`${TAG} shows its static figure:`, error);
      }
    }

    build() {
      const { data } = this;
      this.view = { start: 0, end: 1 };
      this.mode = "raw";
      this.index = 0;
      this.row = 0;
      this.picked = null;
      this.top = 0; // how far the strip has moved down, to stay in view
      this.pointers = new Map();

      const button = (text, label, action) => part("button", { type: "button", ariaLabel: label, title: label, onclick: action }, text);
      this.modes = ["raw", "rolled"].map((mode) =>
        part("button", { type: "button", onclick: () => this.setMode(mode) }, mode === "raw" ? "Raw" : "Rolled up"));
      const bar = part("div", { className: "bar" }, part("strong", {}, data.title));
      if (data.traces.length > 1 && data.layout === "switch") {
        this.chooser = part("select", { onchange: () => this.setTrace(this.chooser.selectedIndex) },
          ...data.traces.map((trace) => part("option", {}, trace.label)));
        bar.append(part("label", {}, "Trace", this.chooser));
      }
      bar.append(
        part("div", { className: "group", role: "group", ariaLabel: "View" }, ...this.modes),
        part("div", { className: "group", role: "group", ariaLabel: "Zoom" },
          button("−", "Zoom out", () => this.zoom(2)),
          button("+", "Zoom in", () => this.zoom(0.5)),
          button("All", "All: show the whole window", () => this.show(0, this.span))),
      );
      this.canvas = part("canvas", { tabIndex: 0, role: "img" });
      this.tip = part("div", { className: "tip", hidden: true, ariaHidden: "true" });
      this.said = part("p", { className: "said", ariaLive: "polite" });
      this.legend = part("ul", { className: "legend", ariaLabel: "Colours" });
      this.note = part("p", { className: "note" });
      const help = part("details", {}, part("summary", {}, "Keys and gestures"),
        part("dl", {}, ...HELP.flatMap(([key, text]) => [part("dt", {}, key), part("dd", {}, text)])));
      const sheet = new CSSStyleSheet(); // allowed where a page's policy forbids inline styles
      sheet.replaceSync(STYLE);
      const root = this.attachShadow({ mode: "open" });
      root.adoptedStyleSheets = [sheet];
      root.append(bar, part("div", { className: "stage" }, this.canvas, this.tip), this.said, this.legend, this.note, help);

      this.still = matchMedia("(prefers-reduced-motion: reduce)");
      new ResizeObserver(() => this.redraw()).observe(this.canvas.parentElement);
      addEventListener("scroll", () => {
        const [from] = this.inSight();
        if (from !== this.top || this.box.height > innerHeight) this.redraw();
      }, { passive: true, capture: true });
      new MutationObserver(() => this.theme()).observe(document.documentElement, { attributes: true });
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.theme());
      for (const [event, on] of [["beforeprint", true], ["afterprint", false]])
        addEventListener(event, () => {
          this.printing = on;
          this.theme(); // paper is white
          this.draw();
        });
      this.listen();
      this.theme();
      this.arrange();
      this.show(0, this.span, false);
      this.draw(); // now, so that a failure falls back to the static figure
    }

    // ---- State ---------------------------------------------------------------------------------------------------

    get traces() {
      return this.data.layout === "stacked" ? this.data.traces : [this.data.traces[this.index]];
    }

    get span() {
      return Math.max(...this.traces.map((trace) => trace.span));
    }

    // What is drawn, from top to bottom: the rows of the traces in view.
    arrange() {
      const stacked = this.data.layout === "stacked" && this.data.traces.length > 1;
      this.rows = [];
      for (const trace of this.traces) {
        if (stacked) this.rows.push({ kind: "heading", label: trace.label, of: [], trace });
        for (const row of trace.views[this.mode]) {
          const of = row.of.map(([lane, group, sign]) => ({ lane, levels: trace.lanes[lane], group, sign }));
          this.rows.push({ ...row, of, trace });
        }
      }
      this.row = Math.max(0, this.rows.findIndex((row) => row.kind !== "heading"));
      this.picked = null;
      this.map = null;
      const used = new Set();
      for (const { of } of this.rows)
        for (const { levels, group, sign } of of) {
          if (sign < 0) continue;
          if (group >= 0) used.add(group);
          else new Set(levels[levels.length - 1].name).forEach((name) => used.add(this.data.groupOfName[name]));
        }
      // Rolled up, the rows say it themselves.
      this.legend.replaceChildren(...(this.mode === "rolled" ? [] : [...used].filter((group) => group > 0).sort((a, b) => a - b)).map((group) => {
        const patch = part("i");
        patch.dataset.group = group;
        return part("li", {}, patch, this.data.groups[group][0].slice(0, 60));
      }));
      this.modes.forEach((button, i) => button.setAttribute("aria-pressed", String((i === 1) === (this.mode === "rolled"))));
      const said = this.data.layout === "stacked" ? this.data.said.join(" ") : this.data.said[this.index];
      this.canvas.setAttribute("aria-label", said);
      this.paintLegend();
      this.say(null);
      this.redraw();
    }

    setMode(mode) {
      this.mode = mode;
      this.arrange();
    }

    setTrace(index) {
      this.index = index;
      if (this.chooser) this.chooser.selectedIndex = index;
      this.arrange();
      this.show(0, this.span, false);
    }

    // Show a window of time, within what there is.
    show(start, end, moving = true) {
      const length = Math.min(Math.max(end - start, LEAST_NS), Math.max(this.span, LEAST_NS));
      const middle = (start + end) / 2;
      const first = Math.min(Math.max(middle - length / 2, 0), Math.max(this.span - length, 0));
      const goal = { start: first, end: first + length };
      cancelAnimationFrame(this.motion);
      if (!moving || this.still.matches) {
        this.view = goal;
        this.redraw();
        return;
      }
      const from = this.view;
      const began = performance.now();
      const step = (now) => {
        const t = Math.min(Math.max((now - began) / 180, 0), 1);
        const eased = 1 - (1 - t) ** 3;
        this.view = t === 1 ? goal : { start: from.start + (goal.start - from.start) * eased,
          end: from.end + (goal.end - from.end) * eased };
        this.redraw();
        if (t < 1) this.motion = requestAnimationFrame(step);
      };
      this.motion = requestAnimationFrame(step);
    }

    zoom(factor, at = (this.view.start + this.view.end) / 2, moving = true) {
      // At a border the window would slide: what lies under the pointer must stay there as long as it can.
      const length = Math.min(Math.max((this.view.end - this.view.start) * factor, LEAST_NS), Math.max(this.span, LEAST_NS));
      const share = (at - this.view.start) / (this.view.end - this.view.start);
      this.show(at - share * length, at + (1 - share) * length, moving);
    }

    pan(share, moving = true) {
      const by = share * (this.view.end - this.view.start);
      this.show(this.view.start + by, this.view.end + by, moving);
    }

    // ---- Colours of the page -------------------------------------------------------------------------------------

    theme() {
      // Read back as pixels, because a computed colour can be written in any of a dozen notations.
      const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      probe.fillStyle = getComputedStyle(this).color;
      probe.fillRect(0, 0, 1, 1);
      const ink = [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
      const dark = luminance(ink) > 0.3; // light letters: a dark page
      this.font = getComputedStyle(this).fontFamily;
      const shades = this.data.groups.map(([, hex]) => shade(hex, dark));
      this.colours = {
        ink, dark,
        letters: dark ? "#0b0e12" : "#ffffff",
        fills: shades.map((rgb) => css(rgb)),
        pixels: shades.map((rgb) => new Uint32Array(new Uint8ClampedArray([...rgb.map(Math.round), 255]).buffer)[0]),
        // Neighbouring ranges must not read as one.
        ranges: [shade("#7d8590", dark), shade(dark ? "#646c77" : "#565e69", dark)].map((rgb) => css(rgb)),
        accent: css(shade("#2f7fc1", dark)),
      };
      this.style.setProperty("--accent", this.colours.accent);
      this.style.setProperty("--on-accent", this.colours.letters);
      this.style.setProperty("--tip", css(mixed(ink, dark ? [255, 255, 255] : [0, 0, 0], 0.3)));
      this.style.setProperty("--on-tip", this.colours.letters);
      this.map = null;
      this.paintLegend();
      this.redraw();
    }

    paintLegend() {
      for (const patch of this.legend.querySelectorAll("i")) patch.style.background = this.colours.fills[patch.dataset.group];
    }

    // ---- Drawing -------------------------------------------------------------------------------------------------

    redraw() {
      this.frame ||= requestAnimationFrame(() => {
        this.frame = 0;
        this.draw();
      });
    }

    measure() {
      const width = Math.max(this.canvas.parentElement.clientWidth, 200);
      const narrow = width < 560; // labels stand above their rows then
      const left = narrow ? 3 : Math.min(190, Math.round(width * 0.24));
      let y = MAP + AXIS + 4;
      for (const row of this.rows) {
        row.label_height = narrow && row.label && row.kind !== "heading" ? 15 : 0;
        row.top = y + row.label_height;
        row.height = { heading: 24, share: 28, events: 28, ranges: 22 }[row.kind];
        // Nested ranges lie close under the ones they are part of.
        y = row.top + row.height + (row.kind === "ranges" ? 2 : 5);
      }
      this.box = { left, width: width - left - 3, all: width, height: Math.max(y, MAP + AXIS + 40), narrow };
    }

    draw() {
      this.measure();
      const { canvas, box, colours } = this;
      const ratio = Math.min(devicePixelRatio || 1, 2);
      const [wide, high] = [Math.round(box.all * ratio), Math.round(box.height * ratio)];
      if (canvas.width !== wide || canvas.height !== high) {
        canvas.width = wide;
        canvas.height = high;
        canvas.style.height = `${box.height}px`;
        this.map = null;
      }
      const pen = canvas.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, box.all, box.height);
      pen.textBaseline = "middle";
      const [from, to] = this.inSight();
      this.top = Math.min(from, Math.max(box.height - MAP - AXIS - 60, 0));
      this.drawAxis(pen);
      for (const [number, row] of this.rows.entries()) {
        // What is scrolled out of sight is not worth drawing.
        if (row.top > to || row.top + row.height < from + MAP + AXIS) continue;
        if (row.kind === "heading") {
          pen.font = `600 14px ${this.font}`;
          pen.fillStyle = css(colours.ink);
          pen.fillText(row.label, 5, row.top + 13, box.all - 8);
          continue;
        }
        pen.fillStyle = css(colours.ink, 0.05);
        pen.fillRect(box.left, row.top, box.width, row.height);
        pen.save();
        pen.beginPath();
        pen.rect(box.left, row.top - 1, box.width, row.height + 2);
        pen.clip();
        if (row.kind === "share") row.share = this.drawShare(pen, row, this.view, box.left, row.top, box.width, row.height);
        else this.drawEvents(pen, row);
        pen.restore();
        this.drawLabel(pen, row, number);
      }
      if (!this.rows.length) {
        pen.font = `13px ${this.font}`;
        pen.fillStyle = css(colours.ink);
        pen.fillText("no events to draw", box.left, MAP + AXIS + 20);
      }
      this.drawPicked(pen);
      this.drawHead(pen, ratio);
      this.describe();
    }

    // The part of a tall picture that the reader sees, in its own pixels. All of one that fits.
    inSight() {
      const { height } = this.box;
      if (height <= innerHeight || this.printing) return [0, height];
      const { top } = this.canvas.getBoundingClientRect();
      // What a page keeps on top of the window, it takes into account when it scrolls to something.
      const covered = parseFloat(getComputedStyle(document.documentElement).scrollPaddingTop) || 0;
      return [Math.max(covered - top, 0), Math.min(innerHeight - top, height)];
    }

    // The strip and the times stay in view while the reader scrolls through the rows.
    drawHead(pen, ratio) {
      pen.save();
      pen.translate(0, this.top);
      if (this.top) pen.clearRect(0, 0, this.box.all, MAP + AXIS);
      this.drawMap(pen, ratio);
      this.drawTimes(pen);
      pen.restore();
    }

    drawLabel(pen, row, number) {
      const { box, colours } = this;
      if (!row.label) return;
      const chosen = this.matchesFocus && number === this.row;
      const y = box.narrow ? row.top - 7 : row.top + row.height / 2;
      const room = (box.narrow ? box.all : box.left) - 16;
      pen.fillStyle = css(colours.ink);
      pen.font = `${chosen ? 700 : 400} 12px ${this.font}`;
      let used = 0;
      if (row.kind === "share") {
        // The share of the window in view, right-aligned, so that shares compare down the column.
        pen.textAlign = "right";
        pen.fillText(percent(row.share), room + 7, y);
        pen.textAlign = "left";
        used = 54;
      }
      pen.fillText(fitted(pen, row.label, room - used, true), 5, y);
    }

    // The level whose cells are at most a pixel long: the coarsest that looks like the finest.
    level(levels, perPixel) {
      let chosen = levels[0];
      for (const level of levels) if (level.cell <= perPixel) chosen = level;
      return chosen;
    }

    // Adds up, a pixel column and a group, which share of its time is covered.
    gather(bins, level, source, view, columns) {
      const { groupOfName } = this.data;
      const perPixel = (view.end - view.start) / columns;
      const { start, end, busy, name } = level;
      const last = above(start, view.end);
      for (let i = above(level.reach, view.start); i < last; i++) {
        const group = source.sign < 0 ? -1 : groupOfName[name[i]];
        if (source.group >= 0 && group !== source.group) continue;
        spread(binOf(bins, group, columns), start[i], end[i], busy[i], view.start, perPixel, columns);
      }
    }

    // Draws columns whose height is the share of time covered, stacked by group. Returns the share over all of them.
    // As pixels of a picture: thousands of rectangles would take a browser longer than all that is added up here.
    drawBins(pen, bins, left, top, columns, height) {
      const less = bins.get(-1);
      bins.delete(-1);
      if (!bins.size) return 0;
      const groups = [...bins.keys()].sort((a, b) => a - b);
      const high = 2 * height; // twice as fine as the page, which smooths it
      const picture = (this.picture ||= document.createElement("canvas"));
      const inner = picture.getContext("2d");
      if (picture.width !== columns || picture.height !== high) {
        [picture.width, picture.height] = [columns, high];
        this.pixels = inner.createImageData(columns, high);
      }
      const pixels = new Uint32Array(this.pixels.data.buffer).fill(0);
      let whole = 0;
      for (let x = 0; x < columns; x++) {
        let sum = 0;
        for (const group of groups) sum += bins.get(group)[x];
        if (!(sum > 0)) continue;
        const covered = Math.min(Math.max(sum - (less ? less[x] : 0), 0), 1);
        whole += covered;
        // Never less than a pixel: two microseconds in ten seconds must not vanish.
        const scale = Math.max(covered * high, 3) / sum;
        let end = high;
        let y = high;
        for (const group of groups) {
          end -= bins.get(group)[x] * scale;
          const colour = this.colours.pixels[group];
          for (const stop = Math.max(Math.round(end), 0); y > stop; ) pixels[--y * columns + x] = colour;
        }
      }
      inner.putImageData(this.pixels, 0, 0);
      pen.drawImage(picture, left, top, columns, height);
      return whole / columns;
    }

    drawShare(pen, row, view, left, top, width, height) {
      const columns = Math.max(Math.floor(width), 1);
      const bins = new Map();
      const perPixel = (view.end - view.start) / columns;
      for (const source of row.of) this.gather(bins, this.level(source.levels, perPixel), source, view, columns);
      const share = this.drawBins(pen, bins, left, top, columns, height);
      // Of the time that this trace has: stacked, another one can be longer.
      const there = Math.min(view.end, row.trace.span) - Math.max(view.start, 0);
      return there > 0 ? Math.min((share * (view.end - view.start)) / there, 1) : 0;
    }

    drawEvents(pen, row) {
      const { box, view, colours, data } = this;
      const columns = Math.max(Math.floor(box.width), 1);
      const perPixel = (view.end - view.start) / columns;
      const bins = new Map();
      const written = [];
      let fill = "";
      for (const source of row.of) {
        const level = this.level(source.levels, perPixel);
        const { start, end, busy, count, name } = level;
        const last = above(start, view.end);
        for (let i = above(level.reach, view.start); i < last; i++) {
          const group = data.groupOfName[name[i]];
          const wide = (end[i] - start[i]) / perPixel;
          if (count[i] > 1 || wide < 2) {
            spread(binOf(bins, group, columns), start[i], end[i], busy[i], view.start, perPixel, columns);
            continue;
          }
          if (end[i] <= view.start) continue;
          const from = Math.max((start[i] - view.start) / perPixel, -4);
          const to = Math.min((end[i] - view.start) / perPixel, columns + 4);
          const colour = group === 0 ? colours.ranges[i % 2] : colours.fills[group];
          if (colour !== fill) pen.fillStyle = fill = colour;
          // A hairline between neighbours, where there is room for one.
          pen.fillRect(box.left + from, row.top, to - from - (wide > 4 ? 0.75 : 0), row.height);
          if (to - from > 26) written.push([from, to, i, name[i]]);
        }
      }
      this.drawBins(pen, bins, box.left, row.top, columns, row.height);
      pen.font = `11px ${this.font}`;
      pen.fillStyle = colours.letters;
      for (const [from, to, , name] of written) {
        const [left, right] = [Math.max(from, 0), Math.min(to, columns)];
        const text = data.names[name][0];
        pen.fillText(fitted(pen, row.kind === "ranges" ? text : brief(text), right - left - 8), box.left + left + 4, row.top + row.height / 2 + 0.5);
      }
    }

    // Where lines stand, and what is written there.
    ticks() {
      const { box, view } = this;
      const first = this.traces.length === 1 ? this.traces[0].first : 0;
      const [from, to] = [view.start + first, view.end + first];
      const [scale, unit] = unitOf(Math.max(Math.abs(from), Math.abs(to)) || 1);
      const rough = ((to - from) * 100) / box.width;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = Math.max([1, 2, 5, 10].find((k) => k * power >= rough) * power, 1);
      const digits = Math.min(Math.max(0, Math.ceil(Math.log10(scale / step) - 1e-9)), 9);
      const found = [];
      for (let k = Math.ceil(from / step); k * step <= to; k++)
        found.push([box.left + ((k * step - from) / (to - from)) * box.width, `${((k * step) / scale).toFixed(digits)} ${unit}`]);
      return found;
    }

    drawAxis(pen) {
      pen.strokeStyle = css(this.colours.ink, 0.13);
      pen.lineWidth = 1;
      for (const [x] of this.ticks()) {
        pen.beginPath();
        pen.moveTo(Math.round(x) + 0.5, this.top + MAP + AXIS - 2);
        pen.lineTo(Math.round(x) + 0.5, this.box.height);
        pen.stroke();
      }
    }

    drawTimes(pen) {
      const { box, colours } = this;
      pen.font = `11px ${this.font}`;
      pen.fillStyle = css(colours.ink, 0.85);
      for (const [x, text] of this.ticks()) {
        const half = pen.measureText(text).width / 2;
        // A label that would stick out is moved in.
        pen.fillText(text, Math.min(Math.max(x - half, box.left), box.all - 2 * half), MAP + AXIS / 2 + 1);
      }
    }

    // The whole window, with a frame around what is shown below. Drawn once, then copied.
    drawMap(pen, ratio) {
      const { box, colours, view, span } = this;
      if (!this.map) {
        this.map = document.createElement("canvas");
        this.map.width = Math.round(box.width * ratio);
        this.map.height = Math.round(MAP * ratio);
        const inner = this.map.getContext("2d");
        inner.setTransform(ratio, 0, 0, ratio, 0, 0);
        inner.fillStyle = css(colours.ink, 0.05);
        inner.fillRect(0, 0, box.width, MAP);
        const strips = this.traces.flatMap((trace) => trace.strip.map((of) => ({
          trace, of: of.map(([lane, group, sign]) => ({ levels: trace.lanes[lane], group, sign })) })));
        const high = MAP / strips.length;
        strips.forEach((row, i) => this.drawShare(inner, row, { start: 0, end: span }, 0, i * high, box.width, high - (i + 1 < strips.length)));
      }
      pen.drawImage(this.map, box.left, 0, box.width, MAP);
      const from = box.left + (view.start / span) * box.width;
      const to = box.left + Math.min(view.end / span, 1) * box.width;
      pen.fillStyle = css(colours.dark ? [0, 0, 0] : [255, 255, 255], 0.6);
      pen.fillRect(box.left, 0, from - box.left, MAP);
      pen.fillRect(to, 0, box.left + box.width - to, MAP);
      pen.strokeStyle = colours.accent;
      pen.lineWidth = 2;
      pen.strokeRect(Math.min(from + 1, box.all - 4), 1, Math.max(to - from - 2, 2), MAP - 2);
      if (!box.narrow) {
        pen.font = `12px ${this.font}`;
        pen.fillStyle = css(colours.ink, 0.85);
        pen.fillText("whole window", 5, MAP / 2);
      }
    }

    drawPicked(pen) {
      const { picked, box, view, colours } = this;
      if (!picked) return;
      const row = this.rows[picked.row];
      const x = (t) => box.left + ((t - view.start) / (view.end - view.start)) * box.width;
      const [from, to] = [Math.max(x(picked.start), box.left - 4), Math.min(x(picked.end), box.all + 4)];
      if (to < box.left || from > box.all) return;
      pen.save();
      pen.beginPath();
      pen.rect(box.left, row.top - 2, box.width + 1, row.height + 4);
      pen.clip();
      pen.strokeStyle = css(colours.ink);
      pen.lineWidth = 2;
      pen.strokeRect(from, row.top, Math.max(to - from, 2), row.height);
      pen.restore();
    }

    // ---- Words about what is shown -------------------------------------------------------------------------------

    describe() {
      const traces = this.traces;
      const first = traces.length === 1 ? traces[0].first : 0;
      const { start, end } = this.view;
      const merged = traces.filter((trace) => trace.merged);
      const whole = end - start >= this.span;
      const text = [
        whole ? `Shown: all ${duration(this.span)}` : `Shown: ${duration(end - start)} of ${duration(this.span)}, from ${duration(start + first)}`,
        traces.length > 1 ? ", each trace from its own start" : "",
        this.mode === "rolled" ? "; heights and numbers are shares of time." : ".",
        ...traces.filter((trace) => trace.left_out).map((trace) =>
          ` Not drawn${traces.length > 1 ? ` of ${trace.label}` : ""}: ${trace.left_out}.`),
        merged.length ? ` Neighbouring events shorter than ${duration(Math.max(...merged.map((t) => t.merged)))} are drawn as one, with their number.` : "",
      ].join("");
      if (this.note.textContent !== text) this.note.textContent = text;
    }

    facts(found) {
      const row = this.rows[found.row];
      const [name, group] = this.data.names[found.name];
      const begin = moment(found.start + row.trace.first);
      // Which thread or stream: the row of the raw view, or the nearest above it that has a label.
      const raw = row.trace.views.raw;
      const mine = raw.findIndex((r) => r.of.some(([lane]) => lane === found.lane));
      const where = raw.slice(0, mine + 1).reverse().find((r) => r.label).label;
      const kind = row.kind === "ranges" ? "" : `${this.data.groups[group][0]} · `;
      if (found.count > 1)
        return [`${found.count.toLocaleString("en")} events, the longest: ${name}`,
          `${kind}together ${duration(found.busy)} in ${duration(found.end - found.start)} · from ${begin} · ${where}`];
      return [name, `${kind}${duration(found.end - found.start)} · starts at ${begin} · ${where}`];
    }

    say(found) {
      if (!found) {
        this.said.replaceChildren(HINT);
        return;
      }
      const [name, rest] = this.facts(found);
      this.said.replaceChildren(part("span", { className: "name", dir: "auto" }, name), rest);
    }

    // ---- Finding events ------------------------------------------------------------------------------------------

    at(x, y) {
      const { box, view } = this;
      const row = y < this.top + MAP + AXIS ? -1
        : this.rows.findIndex((r) => r.kind !== "heading" && y >= r.top && y < r.top + r.height);
      if (row < 0 || x < box.left) return { row, event: null };
      const perPixel = (view.end - view.start) / box.width;
      const t = view.start + (x - box.left) * perPixel;
      let best = null;
      let away = 3; // pixels: narrower than a fingertip, wider than a 1 µs kernel
      for (const source of this.rows[row].of) {
        if (source.sign < 0) continue;
        const level = this.level(source.levels, perPixel);
        const last = above(level.start, t + 3 * perPixel);
        // Backwards from the last that began; none further back reaches this far, once `reach` says so.
        for (let i = last - 1, tries = 0; i >= 0 && tries < 500; i--, tries++) {
          if (level.reach[i] < t - 3 * perPixel) break;
          if (source.group >= 0 && this.data.groupOfName[level.name[i]] !== source.group) continue;
          const far = Math.max(level.start[i] - t, t - level.end[i], 0) / perPixel;
          if (far < away) {
            away = far;
            best = { row, lane: source.lane, start: level.start[i], end: level.end[i], busy: level.busy[i], count: level.count[i], name: level.name[i] };
          }
          if (far === 0) break;
        }
      }
      return { row, event: best };
    }

    // The next event of the chosen row, or the previous one.
    step(forwards) {
      const row = this.rows[this.row];
      if (!row) return;
      const from = this.picked && this.picked.row === this.row ? this.picked.start : null;
      let best = null;
      for (const source of row.of) {
        if (source.sign < 0) continue;
        const level = source.levels[0];
        const suits = (i) => source.group < 0 || this.data.groupOfName[level.name[i]] === source.group;
        // Without an event to go on from, begin at the edge of the window.
        let i = forwards ? (from === null ? above(level.reach, this.view.start) : above(level.start, from))
          : above(level.start, from === null ? this.view.end : from - 0.5) - 1;
        while (i >= 0 && i < level.size && !suits(i)) i += forwards ? 1 : -1;
        if (i < 0 || i >= level.size) continue;
        if (!best || (forwards ? level.start[i] < best.start : level.start[i] > best.start))
          best = { row: this.row, lane: source.lane, start: level.start[i], end: level.end[i], busy: level.busy[i], count: level.count[i], name: level.name[i] };
      }
      if (!best) return;
      this.pick(best);
      const { start, end } = this.view;
      if (best.start < start || best.start > end) this.show(best.start - (end - start) / 2, best.start + (end - start) / 2);
    }

    pick(found) {
      this.picked = found;
      if (found) this.row = found.row;
      this.say(found);
      this.redraw();
    }

    zoomTo(found) {
      const margin = Math.max((found.end - found.start) * 0.6, LEAST_NS);
      this.show(found.start - margin, found.end + margin);
    }

    onMap(y) {
      return y >= this.top && y < this.top + MAP;
    }

    // For the page around it: shows a moment of a trace, and says what lies there.
    reveal(number, start, end) {
      if (this.data.layout !== "stacked" && this.index !== number) this.setTrace(number);
      const { first } = this.data.traces[number];
      const margin = Math.max((end - start) * 0.6, LEAST_NS);
      this.show(start - first - margin, end - first + margin);
      this.scrollIntoView({ behavior: this.still.matches ? "auto" : "smooth", block: "start" });
      this.canvas.focus({ preventScroll: true });
    }

    // ---- Hands ---------------------------------------------------------------------------------------------------

    listen() {
      const { canvas } = this;
      const place = (event) => {
        const frame = canvas.getBoundingClientRect();
        return [event.clientX - frame.left, event.clientY - frame.top];
      };
      const timeAt = (x) => this.view.start + ((x - this.box.left) / this.box.width) * (this.view.end - this.view.start);

      canvas.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        const [x, y] = place(event);
        canvas.setPointerCapture(event.pointerId);
        this.pointers.set(event.pointerId, { x, t: timeAt(x), fromX: x, fromY: y, moved: false, onMap: this.onMap(y) });
        cancelAnimationFrame(this.motion);
        if (this.onMap(y)) this.lookAt(x);
      });

      canvas.addEventListener("pointermove", (event) => {
        const [x, y] = place(event);
        const mine = this.pointers.get(event.pointerId);
        if (!mine) {
          if (event.pointerType === "mouse") this.hover(x, y);
          return;
        }
        mine.x = x;
        if (mine.onMap) {
          this.lookAt(x);
          return;
        }
        if (Math.hypot(x - mine.fromX, y - mine.fromY) > 4) mine.moved = true;
        if (!mine.moved) return;
        this.tip.hidden = true;
        canvas.classList.add("dragged");
        const [a, b] = [...this.pointers.values()];
        if (b) {
          // Two fingers: the times they were put on stay under them.
          b.moved = a.moved = true;
          if (Math.abs(b.x - a.x) < 8 || a.t === b.t) return;
          const perPixel = Math.abs((b.t - a.t) / (b.x - a.x));
          const start = a.t - (a.x - this.box.left) * perPixel;
          this.show(start, start + perPixel * this.box.width, false);
        } else {
          const by = mine.t - timeAt(x);
          this.show(this.view.start + by, this.view.end + by, false);
        }
      });

      const release = (event) => {
        const mine = this.pointers.get(event.pointerId);
        this.pointers.delete(event.pointerId);
        // The finger that stays goes on from where it is.
        for (const other of this.pointers.values()) other.t = timeAt(other.x);
        canvas.classList.remove("dragged");
        if (!mine || mine.moved || mine.onMap || event.type !== "pointerup") return;
        const { row, event: found } = this.at(...place(event));
        if (row >= 0) this.row = row;
        this.pick(found);
      };
      canvas.addEventListener("pointerup", release);
      canvas.addEventListener("pointercancel", release);
      canvas.addEventListener("pointerleave", () => {
        this.tip.hidden = true;
      });

      canvas.addEventListener("dblclick", (event) => {
        const [x, y] = place(event);
        const { event: found } = this.at(x, y);
        if (found) this.zoomTo(found);
        else if (!this.onMap(y)) this.zoom(0.25, timeAt(x));
      });

      canvas.addEventListener("wheel", (event) => {
        const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
        const sideways = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
        const focused = this.matchesFocus;
        const [x] = place(event);
        if (event.ctrlKey || event.metaKey || (focused && !event.shiftKey && Math.abs(event.deltaY) >= Math.abs(event.deltaX))) {
          event.preventDefault();
          this.zoom(Math.exp(Math.min(Math.max(event.deltaY * unit, -300), 300) / 300), timeAt(x), false);
        } else if (sideways && (focused || this.view.end - this.view.start < this.span)) {
          event.preventDefault();
          this.pan((sideways * unit) / this.box.width, false);
        } // else the page scrolls: a timeline must not catch a reader passing by
        this.tip.hidden = true;
      }, { passive: false });

      const keys = {
        ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2),
        ArrowUp: () => this.choose(-1), ArrowDown: () => this.choose(1),
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), _: () => this.zoom(2),
        Home: () => this.show(0, this.span), n: () => this.step(true), p: () => this.step(false),
        Enter: () => this.picked && this.zoomTo(this.picked),
        Escape: () => (this.picked ? this.pick(null) : canvas.blur()),
      };
      canvas.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        const action = keys[event.key] || keys[event.key.toLowerCase()];
        if (!action) return;
        event.preventDefault();
        this.tip.hidden = true;
        action();
      });
      for (const change of ["focus", "blur"]) canvas.addEventListener(change, () => this.redraw());
    }

    get matchesFocus() {
      return this.shadowRoot.activeElement === this.canvas;
    }

    choose(by) {
      for (let row = this.row + by; row >= 0 && row < this.rows.length; row += by) {
        if (this.rows[row].kind === "heading") continue;
        this.row = row;
        this.picked = null;
        const y = this.canvas.getBoundingClientRect().top + this.rows[row].top;
        const out = Math.min(y - MAP - AXIS - 80, 0) || Math.max(y + 60 - innerHeight, 0);
        if (this.box.height > innerHeight && out) scrollBy(0, out);
        const label = this.rows[row].label || "nested ranges";
        const share = this.rows[row].kind === "share" ? `, ${percent(this.rows[row].share)} of the time shown` : "";
        this.said.replaceChildren(`Row: ${label}${share}. N goes to its next event.`);
        this.redraw();
        return;
      }
    }

    lookAt(x) {
      const t = ((x - this.box.left) / this.box.width) * this.span;
      const half = (this.view.end - this.view.start) / 2;
      this.show(t - half, t + half, false);
    }

    hover(x, y) {
      const { event: found } = y > this.top + MAP + AXIS ? this.at(x, y) : {};
      this.tip.hidden = !found;
      this.canvas.style.cursor = found ? "pointer" : "";
      if (!found) return;
      const [name, rest] = this.facts(found);
      this.tip.replaceChildren(part("span", { className: "name", dir: "auto" }, name), rest);
      const row = this.rows[found.row];
      const { offsetWidth: wide, offsetHeight: high } = this.tip;
      this.tip.style.left = `${Math.min(Math.max(x + 12, 0), Math.max(this.box.all - wide, 0))}px`;
      const below = row.top + row.height + 6;
      // It may lie over the words below the picture, but not stick out of the element.
      const room = this.getBoundingClientRect().bottom - this.canvas.getBoundingClientRect().top;
      this.tip.style.top = `${below + high > room && row.top > high + 6 ? row.top - high - 6 : below}px`;
    }
  }

  function binOf(bins, group, columns) {
    let bin = bins.get(group);
    if (!bin) bins.set(group, (bin = new Float64Array(columns)));
    return bin;
  }

  // Adds an item to the columns it lies in; its busy time is taken as evenly spread between its start and end.
  function spread(bin, start, end, busy, origin, perPixel, columns) {
    const from = Math.max((start - origin) / perPixel, 0);
    const to = Math.min((end - origin) / perPixel, columns);
    if (to <= from) {
      // An instant still leaves a mark.
      if (start === end && from >= 0 && from < columns) bin[from | 0] += 1e-9;
      return;
    }
    const density = busy / (end - start);
    const first = from | 0;
    const last = Math.min(to | 0, columns - 1);
    if (first === last) {
      bin[first] += (to - from) * density;
      return;
    }
    bin[first] += (first + 1 - from) * density;
    for (let x = first + 1; x < last; x++) bin[x] += density;
    bin[last] += (to - last) * density;
  }

  // As much of a text as fits, by the width of its own letters: its beginning, or its beginning and its end.
  function fitted(pen, text, room, ends = false) {
    if (room < 8) return "";
    const some = text.slice(0, Math.ceil(room / 2));
    const wide = pen.measureText(some).width;
    if (wide <= room && some.length === text.length) return some;
    for (let letters = Math.floor((some.length * room) / Math.max(wide, 1)) - 1; letters > 0; letters--) {
      const tail = ends ? Math.floor(letters / 2) : 0;
      const short = `${text.slice(0, letters - tail)}…${tail ? text.slice(-tail) : ""}`;
      if (pen.measureText(short).width <= room) return short;
    }
    return "";
  }

  customElements.define(TAG, Timeline);
})();
