"use strict";
(async () => {
  const text = (id) => document.getElementById(id).textContent;
  const trouble = () => { document.getElementById("trouble").hidden = false; };
  if (!("DecompressionStream" in window)) return trouble();
  try {
    const packed = Uint8Array.from(atob(text("library")), (char) => char.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    const figures = JSON.parse(text("figures"));
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const ink = () => (dark.matches ? "#c3cad3" : "#3d444d");
    const options = { responsive: true, displayModeBar: false, displaylogo: false, scrollZoom: false, doubleClick: false };
    for (const [id, figure] of Object.entries(figures)) {
      figure.layout.font.color = ink();
      await Plotly.newPlot(id, figure.data, figure.layout, options);
      // The page answers between two plots.
      await new Promise((done) => setTimeout(done, 0));
    }
    dark.addEventListener("change", () => {
      for (const id of Object.keys(figures)) Plotly.relayout(id, { "font.color": ink() });
    });
    document.documentElement.dataset.drawn = Object.keys(figures).length;
  } catch (error) {
    trouble();
    throw error;
  }
})();
