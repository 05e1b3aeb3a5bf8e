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
