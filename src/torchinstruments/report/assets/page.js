"use strict";

// Every text is put into the page as text or, for plotly, was escaped when the page was written.
const byId = (id) => document.getElementById(id);
const theme = {
  chosen: null,
  get isDark() { return (this.chosen ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark"; },
  apply() { document.documentElement.dataset.theme = this.isDark ? "dark" : "light"; },
  color(name) { return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim(); },
};
theme.apply();

async function unpacked(id) {
  const raw = Uint8Array.from(atob(byId(id).textContent), (one) => one.charCodeAt(0));
  byId(id).remove();
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function columnsOf(places, bytes) {
  const found = {};
  for (const [name, { start, length, kind }] of Object.entries(places)) {
    const joined = new Uint8Array(length * 4);
    for (let plane = 0; plane < 4; plane += 1) {
      for (let place = 0; place < length; place += 1) {
        joined[place * 4 + plane] = bytes[start + plane * length + place];
      }
    }
    found[name] = kind === "float" ? new Float32Array(joined.buffer) : new Int32Array(joined.buffer);
  }
  return found;
}

const palette = ["#4c8fd6", "#e07b39", "#3aa76d", "#c65b9b", "#8c6fd1", "#b59a1f", "#3fb0b5", "#d65353"];

function layoutWith(extra) {
  const axis = {
    gridcolor: theme.color("line"), zerolinecolor: theme.color("line"), linecolor: theme.color("line"), automargin: true,
  };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 60, r: 20, t: 30, b: 50 },
    font: { color: theme.color("text"), size: 13 }, hoverlabel: { namelength: -1 }, colorway: palette,
  };
  const merged = { ...base, ...extra };
  merged.font = { ...base.font };
  merged.margin = { ...base.margin, ...(extra.margin ?? {}) };
  for (const name of new Set(["xaxis", "yaxis", ...Object.keys(extra).filter((one) => /^[xy]axis/.test(one))])) {
    merged[name] = { ...axis, ...(extra[name] ?? {}) };
  }
  return merged;
}

const options = { responsive: true, displayModeBar: false };
const number = (value) => (Number.isNaN(value) ? "none" : Number(value.toPrecision(5)).toString());

function fill(select, texts, values) {
  select.replaceChildren(...texts.map((text, place) => {
    const option = document.createElement("option");
    // The names were escaped for plotly; as text they are read back.
    option.textContent = plainText(text);
    option.value = values ? values[place] : place;
    return option;
  }));
}

function plainText(escaped) {
  return escaped.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
}

function shortened(text) {
  const plain = plainText(text);
  if (plain.length <= 44) return text;
  const short = plain.slice(0, 20) + "…" + plain.slice(-23);
  return short.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function ranksText(ranks) {
  const parts = [];
  for (const rank of ranks) {
    const last = parts.at(-1);
    if (last && last[1] === rank - 1) last[1] = rank; else parts.push([rank, rank]);
  }
  return parts.map(([first, last]) => (first === last ? String(first) : first + "-" + last)).join(",");
}

function figures(all) {
  for (const [key, figure] of Object.entries(all)) {
    const layout = { ...figure.layout };
    const rows = key === "skipped" || key === "coverage" ? figure.data[0].y.length : 0;
    layout.height = rows ? Math.max(220, Math.min(560, 130 + rows * 22)) : 340;
    for (const trace of figure.data) {
      if (trace.type === "heatmap") {
        trace.colorscale = [[0, theme.color("middle")], [1, theme.color(key === "coverage" ? "cold" : "warm")]];
      }
    }
    for (const note of layout.annotations ?? []) note.font = { color: theme.color("text"), size: 13 };
    Plotly.react("picture-" + key, figure.data, layoutWith(layout), options);
  }
}

function shortLabel({ generation, attempt, forward }) {
  return "g" + generation + ": " + (attempt === null ? "forward " + forward : attempt + (forward ? "." + forward : ""));
}

class Overview {
  constructor(names, columns, ranks) {
    Object.assign(this, { names, columns, ranks });
    this.starts = new Int32Array(columns.num_shown.length + 1);
    columns.num_shown.forEach((count, row) => { this.starts[row + 1] = this.starts[row] + count; });
    this.runs = new Map();
    for (let row = 0; row < columns.choice.length; row += 1) {
      const key = this.key(columns.choice[row], columns.metric[row], columns.column[row]);
      const run = this.runs.get(key);
      if (run) run[1] = row + 1; else this.runs.set(key, [row, row + 1]);
    }
  }

  key(choice, metric, column) { return choice + "/" + metric + "/" + column; }

  rowsOf(choice, metric, column) {
    const [start, end] = this.runs.get(this.key(choice, metric, column)) ?? [0, 0];
    return Array.from({ length: end - start }, (_, place) => start + place);
  }

  shownOf(row) {
    const found = [];
    const { rank, distance, value, median_of_ranks: median } = this.columns;
    for (let place = this.starts[row]; place < this.starts[row + 1]; place += 1) {
      const own = Number.isNaN(value[place]) ? median[row] + distance[place] : value[place];
      found.push({ rank: rank[place], distance: distance[place], value: own });
    }
    return found;
  }

  metricsOf(choice) {
    return this.names.metrics.map((_, place) => place).filter((metric) =>
      this.names.columns.some((_, column) => this.runs.has(this.key(choice, metric, column))));
  }
}

function interactive(overview) {
  const { names, columns } = overview;
  const state = { choice: 0, metric: 0, column: 0, rank: null, unit: "mads", forward: 0, search: "", log: false };
  const controls = Object.fromEntries(
    ["choice", "metric", "rank", "search", "forward", "unit", "column", "log"].map((id) => [id, byId(id)]));
  const detailed = names.forwards.map((_, place) => place).filter((place) => names.forwards[place].all_groups);
  const mostRanks = columns.num_ranks.reduce((most, one) => Math.max(most, one), 0);

  fill(controls.choice, names.choices);
  fill(controls.rank, ["all that are shown", ...overview.ranks.map((rank) => "rank " + rank)], ["", ...overview.ranks]);
  fill(controls.unit, ["median deviations of ranks", "share of the larger magnitude"], ["mads", "share"]);
  if (mostRanks < 3) { state.unit = "share"; controls.unit.value = "share"; }
  controls.forward.max = Math.max(0, detailed.length - 1);
  controls.forward.value = controls.forward.max;

  const matching = () => names.columns.map((_, place) => place).filter((place) =>
    plainText(names.columns[place]).toLowerCase().includes(state.search) &&
    overview.runs.has(overview.key(state.choice, state.metric, place)));

  function offer() {
    const metrics = overview.metricsOf(state.choice);
    if (!metrics.includes(state.metric)) {
      const usual = metrics.find((one) => names.metrics[one] === "std");
      state.metric = usual ?? metrics[0];
    }
    fill(controls.metric, metrics.map((one) => names.metrics[one]), metrics);
    controls.metric.value = state.metric;
    const found = matching();
    if (!found.includes(state.column) && found.length) state.column = found[0];
    fill(controls.column, found.map((one) => names.columns[one]), found);
    controls.column.value = state.column;
  }

  function distanceOf(row, one) {
    if (Number.isNaN(one.distance)) return NaN;
    if (state.unit === "mads") {
      const mad = columns.mad_of_ranks[row];
      if (mad > 0) return one.distance / mad;
      return one.distance === 0 ? 0 : NaN;
    }
    const size = Math.max(Math.abs(one.value), Math.abs(one.value - one.distance));
    return size > 0 ? one.distance / size : 0;
  }

  function heat() {
    const forward = detailed[state.forward];
    const rows = [];
    for (const column of matching()) {
      const row = overview.rowsOf(state.choice, state.metric, column).find((one) => columns.forward[one] === forward);
      if (row !== undefined) rows.push({ row, column });
    }
    byId("forward-label").textContent = forward === undefined ? "none" : names.forwards[forward].label;
    const shown = rows.map(({ row }) => overview.shownOf(row));
    const groups = new Map();
    const width = names.group_ranks;
    const label = (group) => (width > 1 ? group * width + "-" + ((group + 1) * width - 1) : String(group));
    for (const rank of overview.ranks) {
      const group = Math.floor(rank / width);
      if (!groups.has(group)) groups.set(group, groups.size);
    }
    const z = rows.map(() => new Array(groups.size).fill(null));
    const texts = rows.map(() => new Array(groups.size).fill("no value"));
    const holders = rows.map(() => new Array(groups.size).fill(null));
    rows.forEach(({ row }, place) => {
      const kept = new Array(groups.size).fill(-1);
      for (const one of shown[place]) {
        const group = groups.get(Math.floor(one.rank / width));
        const size = Number.isNaN(one.distance) ? 0 : Math.abs(one.distance);
        if (size <= kept[group]) continue;
        kept[group] = size;
        const distance = distanceOf(row, one);
        z[place][group] = Number.isNaN(distance) ? null : distance;
        holders[place][group] = one.rank;
        texts[place][group] = "rank " + one.rank + ": " + number(one.value) + "<br>median_of_ranks " +
          number(columns.median_of_ranks[row]) + "<br>distance " + number(one.distance) +
          (Number.isNaN(distance) ? ", not in this unit" : " = " + number(distance) + (state.unit === "mads" ? " median deviations" : " of the larger magnitude"));
      }
    });
    const largest = z.flat().reduce((most, one) => Math.max(most, one === null ? 0 : Math.abs(one)), 0);
    // The lowest end keeps the largest of small distances pale.
    const [lowestEnd, highestEnd] = names.colour_ends[state.unit];
    const limit = Math.min(Math.max(largest, lowestEnd), highestEnd);
    const known = z.flat().filter((one) => one !== null).length;
    const trace = {
      type: "heatmap", z, customdata: texts, x: [...groups.values()],
      y: rows.map((_, place) => place), zmin: -limit, zmax: limit, xgap: groups.size <= 64 ? 1 : 0, ygap: rows.length <= 60 ? 1 : 0,
      hovertemplate: "%{text}<br>%{customdata}<extra></extra>",
      text: rows.map(({ column }) => new Array(groups.size).fill(names.columns[column])),
      colorscale: [[0, theme.color("cold")], [0.5, theme.color("middle")], [1, theme.color("warm")]],
      colorbar: { title: { text: state.unit === "mads" ? "median deviations" : "share", side: "right" }, thickness: 14 },
    };
    const height = Math.max(240, Math.min(900, 110 + rows.length * 18));
    const step = Math.max(1, Math.ceil(rows.length / ((height - 110) / 15)));
    const ticks = rows.map((_, place) => place).filter((place) => place % step === 0);
    const every = Math.max(1, Math.ceil(groups.size / (width > 1 ? 12 : 24)));
    const layout = layoutWith({
      height, plot_bgcolor: theme.color("gap"),
      xaxis: { title: { text: width > 1 ? "ranks, the furthest of each group" : "rank" }, showgrid: false, zeroline: false,
        tickmode: "array", tickangle: 0, tickvals: [...groups.values()].filter((place) => place % every === 0),
        ticktext: [...groups.keys()].filter((_, place) => place % every === 0).map(label) },
      yaxis: { range: [rows.length - 0.5, -0.5], showgrid: false, zeroline: false, tickmode: "array",
        tickvals: ticks, ticktext: ticks.map((place) => shortened(names.columns[rows[place].column])) },
    });
    Plotly.react("heat", rows.length ? [trace] : [], layout, options);
    heat.chosen = (place, group) => ({ column: rows[place].column, rank: holders[place][group] });
    byId("heat-caption").textContent = rows.length === 0 ? "No layer of that name has a value at this forward." :
      `Above 0 a value is larger than the median over ranks, which is always one that a rank has` +
      (mostRanks < 3 ? " (of two, the lower one)" : "") + `. Colours end at ${number(limit)} (never below ${lowestEnd} or above ${highestEnd})` +
      (known ? `; the largest distance is ${number(largest)}` : "") + ". Grey: no value" +
      (state.unit === "mads" ? ", or no median deviation because half of the ranks hold the same" : "") +
      (known === 0 ? ". No cell has a distance in this unit; choose the other one" : "") +
      ". A click on a cell shows its series below.";
  }

  function measuredBy(num, ranks) {
    if (ranks.length === 1) return `measured by rank ${ranks[0]} alone`;
    if (ranks.length === num) return `measured by ranks ${ranksText(ranks)}`;
    return `measured by up to ${num} ranks at a forward; the lines are of ranks ${ranksText(ranks.filter((one) => names.line_ranks.includes(one)))}`;
  }

  function series() {
    const rows = overview.rowsOf(state.choice, state.metric, state.column);
    const forwards = names.forwards;
    const isNumeric = forwards.every((one) => one.generation === forwards[0].generation) &&
      rows.every((row) => (forwards[columns.forward[row]].attempt === null) === (forwards[columns.forward[rows[0]]].attempt === null));
    const perAttempt = forwards.reduce((most, one) => Math.max(most, one.attempt === null ? 0 : one.forward), 0) + 1;
    const position = (row) => {
      const one = forwards[columns.forward[row]];
      if (!isNumeric) return columns.forward[row];
      return one.attempt === null ? one.forward : one.attempt + one.forward / perAttempt;
    };
    const x = rows.map(position);
    const labels = rows.map((row) => forwards[columns.forward[row]].label);
    const traces = [];
    const hover = (name) => "%{text}<br>" + name + " %{y:.5g}<extra></extra>";
    if (rows.some((row) => columns.num_ranks[row] > 1)) {
      const band = { mode: "lines", line: { width: 0.5, color: theme.color("quiet") }, x, legendgroup: "band" };
      traces.push({ ...band, y: rows.map((row) => columns.lowest_value[row]), showlegend: false,
        text: rows.map((row, place) => labels[place] + "<br>lowest: rank " + columns.lowest_rank[row]), hovertemplate: hover("value") });
      traces.push({ ...band, y: rows.map((row) => columns.highest_value[row]), fill: "tonexty",
        fillcolor: theme.isDark ? "rgba(150,165,185,0.18)" : "rgba(90,105,125,0.15)", name: "lowest to highest rank",
        text: rows.map((row, place) => labels[place] + "<br>highest: rank " + columns.highest_rank[row]), hovertemplate: hover("value") });
    }
    const lines = new Map();
    rows.forEach((row, place) => {
      for (const one of overview.shownOf(row)) {
        if (!lines.has(one.rank)) lines.set(one.rank, { x: [], y: [], text: [] });
        const line = lines.get(one.rank);
        line.x.push(x[place]); line.y.push(one.value); line.text.push(labels[place]);
      }
    });
    const always = new Set(names.line_ranks);
    let isPartial = false;
    for (const [rank, line] of [...lines].sort((one, other) => one[0] - other[0])) {
      const isChosen = state.rank === rank;
      if (!always.has(rank) && !isChosen) continue;
      if (!always.has(rank)) isPartial = true;
      const own = Math.max(0, names.line_ranks.indexOf(rank));
      // There are more ranks than colours that an eye tells apart.
      const color = palette[own % palette.length], dash = own < palette.length ? "solid" : "dash";
      traces.push({ ...line, mode: always.has(rank) ? "lines+markers" : "markers", name: "rank " + rank,
        opacity: state.rank === null || isChosen ? 1 : 0.25, line: { width: isChosen ? 3 : 1.5, color, dash },
        marker: { size: isChosen ? 7 : 4, color }, hovertemplate: hover("rank " + rank + ":") });
    }
    if (rows.some((row) => !Number.isNaN(columns.median_of_ranks[row]))) {
      traces.push({ x, y: rows.map((row) => columns.median_of_ranks[row]).map((one) => (Number.isNaN(one) ? null : one)),
        mode: "lines", line: { dash: "dot", width: 2, color: theme.color("text") }, name: "median_of_ranks", text: labels, hovertemplate: hover("median_of_ranks") });
    }
    const every = Math.max(1, Math.ceil(rows.length / 12));
    const ticks = rows.map((_, place) => place).filter((place) => place % every === 0);
    const unit = rows.length && forwards[columns.forward[rows[0]]].attempt === null ? "forward of the process" : "attempt";
    const layout = layoutWith({
      height: 420, hovermode: "closest", showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
      xaxis: isNumeric ? { title: { text: unit } } : { title: { text: "attempt of the pictured forwards, in order; g is the generation" }, tickmode: "array",
        tickvals: ticks.map((place) => x[place]), ticktext: ticks.map((place) => shortLabel(forwards[columns.forward[rows[place]]])) },
      yaxis: { title: { text: names.metrics[state.metric] }, type: state.log ? "log" : "linear", exponentformat: "e" },
    });
    Plotly.react("series", traces, layout, options);
    const num = rows.reduce((most, row) => Math.max(most, columns.num_ranks[row]), 0);
    const without = rows.reduce((most, row) => Math.max(most, columns.num_ranks_without_value[row]), 0);
    byId("series-caption").textContent = rows.length === 0 ? "There is no such series." :
      `${plainText(names.columns[state.column])}, ${plainText(names.choices[state.choice])}, ${plainText(names.metrics[state.metric])}, ` +
      measuredBy(num, [...lines.keys()].sort((one, other) => one - other)) + (without ? `; at a forward ${without} had no value` : "") + ". " +
      (state.log ? "What is not above 0 cannot be shown on a logarithmic axis. " : "") +
      (state.rank !== null && !lines.has(state.rank) ? `Rank ${state.rank} is among the band, and was nowhere the furthest of its group. ` : "") +
      (isPartial ? (names.group_ranks > 1 ? `Rank ${state.rank} has a point where it was the furthest of its group. `
        : `Rank ${state.rank} has a point at each forward that has all ranks. `) : "") +
      (isNumeric && perAttempt > 1 ? "Forwards of one attempt stand between it and the next." : "");
  }

  const isAlone = mostRanks < 2 && overview.ranks.length < 2;
  byId("distance").hidden = isAlone;
  byId("alone").hidden = !isAlone;
  function draw() { offer(); if (!isAlone) heat(); series(); }

  const chosen = {
    choice: (value) => { state.choice = Number(value); },
    metric: (value) => { state.metric = Number(value); },
    column: (value) => { state.column = Number(value); },
    rank: (value) => { state.rank = value === "" ? null : Number(value); },
    unit: (value) => { state.unit = value; },
    search: (value) => { state.search = value.trim().toLowerCase(); },
    forward: (value) => { state.forward = Number(value); },
  };
  for (const [id, take] of Object.entries(chosen)) {
    const moment = controls[id].tagName === "SELECT" ? "change" : "input";
    controls[id].addEventListener(moment, (event) => { take(event.target.value); draw(); });
  }
  controls.log.addEventListener("change", (event) => { state.log = event.target.checked; series(); });
  state.forward = Number(controls.forward.value);
  const usual = names.metrics.indexOf("std");
  state.metric = usual >= 0 ? usual : 0;

  function choose({ choice, metric, column, forward }) {
    const places = [names.choices.indexOf(choice), names.metrics.indexOf(metric), names.columns.indexOf(column)];
    if (places.some((one) => one < 0)) return false;
    [state.choice, state.metric, state.column] = places;
    controls.choice.value = state.choice;
    const place = detailed.findIndex((one) => names.forwards[one].label === forward);
    if (place >= 0) { state.forward = place; controls.forward.value = place; }
    return true;
  }

  if (names.opening && choose(names.opening)) {
    const opened = overview.rowsOf(state.choice, state.metric, state.column)
      .find((row) => columns.forward[row] === detailed[state.forward]);
    // Where half of the ranks hold the same, the one that is apart has no distance in median deviations.
    if (opened !== undefined && !(columns.mad_of_ranks[opened] > 0)) state.unit = "share";
    controls.unit.value = state.unit;
  }
  draw();
  if (!isAlone) byId("heat").on("plotly_click", (event) => {
    const [place, group] = event.points[0].pointIndex;
    const { column, rank } = heat.chosen(place, group);
    state.column = column;
    if (rank !== null) { state.rank = rank; controls.rank.value = rank; }
    draw();
  });
  return { draw, select(row) {
    if (!choose(row)) return;
    state.search = ""; controls.search.value = "";
    state.rank = row.rank; controls.rank.value = row.rank ?? "";
    draw();
    byId("series").scrollIntoView({ behavior: "smooth", block: "center" });
  } };
}

async function main() {
  if (!("DecompressionStream" in window)) {
    byId("headline").textContent += " (pictures need a browser of 2023 or later)";
    return;
  }
  const [names, numbers, plotly] = await Promise.all(["names", "numbers", "plotly"].map(unpacked));
  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(plotly);
  document.head.append(script);
  const found = JSON.parse(new TextDecoder().decode(names));
  figures(found.figures);
  const shown = found.overview
    ? interactive(new Overview(found.overview, columnsOf(found.overview.arrays, numbers), found.ranks)) : null;
  byId("theme").addEventListener("click", () => {
    theme.chosen = theme.isDark ? "light" : "dark";
    theme.apply();
    figures(found.figures);
    shown?.draw();
  });
  for (const row of document.querySelectorAll(".rows tbody tr")) {
    const open = () => shown?.select(found.rows[Number(row.dataset.place)]);
    row.addEventListener("click", open);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") open(); });
  }
  document.documentElement.dataset.ready = "yes";
}

main();
