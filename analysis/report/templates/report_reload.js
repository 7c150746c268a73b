// The page of a sweep that runs loads itself anew, and keeps its place: browsers restore the scroll position on a reload.
(() => {
  const every = {{ data.run.reload.every_s * 1000 }}, until = {{ data.run.reload.until_ms }};
  const reload = () => {
    // not while the reader has zoomed a figure or opened a part, which a reload would undo
    if (Date.now() > until) return;
    if (document.querySelector("svg.zoomed, details[open]")) setTimeout(reload, every);
    else location.reload();
  };
  setTimeout(reload, every);
})();
