// The page "Watch it sort": controls, tape, bars and attention around the forward pass in sorter.js.
(() => {
  'use strict';
  const root = document.getElementById('watch');
  if (!root) return;
  let model;
  try { model = minigpt.load(window.minigptWeights); } catch (e) {
    root.replaceChildren(Object.assign(document.createElement('p'), { textContent: 'The sorter could not be loaded. Load the page again, or see whether its folder "assets" is complete.' }));
    return;
  }
  const { context_length, vocab_size, n_layers, n_heads } = model.config;
  const length = (context_length + 1) / 2;  // digits to sort
  const words = ['no', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten'];
  const many = words[length] ?? String(length);
  const example = '314159265358'.slice(0, length);
  const drawings = document.querySelector('svg').namespaceURI;  // the theme button has one
  const range = (n) => [...Array(n).keys()];

  // an element with attributes and children; a name that starts with on is a listener
  function make(tag, attributes = {}, ...children) {
    const e = tag === 'svg' || tag === 'rect' ? document.createElementNS(drawings, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith('on')) e.addEventListener(name.slice(2), value); else e.setAttribute(name, value);
    }
    e.append(...children);
    return e;
  }

  // -- the state -----------------------------------------------------------------------------------------------------

  let ids = [];  // the digits so far, or none while what was typed is no row
  let out = null;  // what the model says about them
  let shares = null;  // probabilities of the next digit; at the end, those of the last one
  let timer = null;  // while playing
  let chosen = [Math.floor(n_layers / 2), 0];  // layer and head of the table
  let pointed = null;  // [layer, head, query, key] under the pointer

  const finished = () => ids.length === 2 * length;
  const temperature = () => Number(slider.value);
  const percent = (share) => (share > 0.999 && share < 1 ? '> 99.9 %' : share < 0.001 && share > 0 ? '< 0.1 %' : `${(100 * share).toFixed(1)} %`);
  const name = ([layer, head]) => `Layer ${layer}, head ${head}`;
  const place = (i) => `position ${i}, the ${i < length ? 'given' : 'written'} ${ids[i]},`;

  // -- the parts of the page, made once -----------------------------------------------------------------------------

  const digits = make('input', { id: 'watch-digits', inputmode: 'numeric', autocomplete: 'off', spellcheck: 'false', size: 8, 'aria-describedby': 'watch-error', oninput: typed, onchange: complain });
  const slider = make('input', { id: 'watch-temperature', type: 'range', min: 0, max: 2, step: 0.1, value: 0, oninput: warmed });
  const slider_text = make('output', { for: 'watch-temperature', 'aria-live': 'off' });
  const step = make('button', { type: 'submit' }, 'Step');
  const play = make('button', { type: 'button', onclick: () => (timer ? pause() : start()) }, 'Play');
  const error = make('p', { id: 'watch-error', class: 'mg-watch-error', role: 'alert' });
  const hint = make('span', { class: 'mg-watch-hint' });
  const form = make('form', { class: 'mg-watch-controls', onsubmit: (e) => { e.preventDefault(); pause(); if (!complain()) advance(); } },
    make('p', {}, make('label', { for: 'watch-digits' }, `${many[0].toUpperCase()}${many.slice(1)} digits`), digits,
      make('button', { type: 'button', onclick: () => { digits.value = range(length).map(() => Math.floor(Math.random() * vocab_size)).join(''); typed(); } }, 'Shuffle'), hint),
    error,
    make('p', {}, step, play, make('button', { type: 'button', onclick: typed }, 'Start again')),
    make('p', {}, make('label', { for: 'watch-temperature' }, 'Temperature'), slider, slider_text));

  const places = range(2 * length).map((i) => make('li', {}, make('span', {}), make('b', {}), make('small', { 'aria-hidden': 'true' }, String(i))));
  const tape = make('ol', { class: 'mg-tape', role: 'list', 'aria-label': 'The sequence' }, ...places);
  const sentence = make('p', { class: 'mg-watch-status' }), verdict = make('p', { class: 'mg-watch-verdict' });
  const live = make('p', { class: 'mg-hidden', role: 'status' });

  const bars_title = make('h2', {});
  const bars = range(vocab_size).map((digit) => make('li', {}, make('b', {}, String(digit)), make('span', { class: 'mg-bar', 'aria-hidden': 'true' }, make('i')), make('small')));

  // a map's squares: a row per query, a column per key, up to the query's own position
  const squares = range(n_layers).map(() => range(n_heads).map(() => range(context_length).map((i) =>
    range(i + 1).map((j) => make('rect', { x: j, y: i, width: 1, height: 1, 'fill-opacity': 0 })))));
  const maps = range(n_layers).map((layer) => range(n_heads).map((head) => {
    const picture = make('svg', { viewBox: `0 0 ${context_length} ${context_length}`, 'aria-hidden': 'true' }, ...squares[layer][head].flat());
    const point_here = (e) => point(layer, head, e, picture.getBoundingClientRect());
    return make('button', { type: 'button', 'aria-label': name([layer, head]), onclick: () => { chosen = [layer, head]; draw_maps(); draw_table(); },
      onpointermove: point_here, onpointerdown: point_here, onpointerleave: (e) => { if (e.pointerType === 'mouse') { pointed = null; say(); } } }, picture);
  }));
  const grid = make('div', { class: 'mg-maps' }, make('span', {}), ...range(n_heads).map((head) => make('span', { 'aria-hidden': 'true' }, `head ${head}`)),
    ...maps.flatMap((row, layer) => [make('span', { 'aria-hidden': 'true' }, `layer ${layer}`), ...row]));
  const readout = make('p', { class: 'mg-readout' });

  const caption = make('caption'), columns = range(context_length).map(() => make('th', { scope: 'col' }));
  const cells = range(context_length).map((i) => range(context_length).map((j) => make('td', { onpointerdown: () => { if (out && i < ids.length && j <= i) { pointed = [...chosen, i, j]; say(); } } })));
  const rows = range(context_length).map(() => make('th', { scope: 'row' }));
  const table = make('div', { class: 'mg-scroll', role: 'region', tabindex: 0, 'aria-label': 'All weights of the chosen head' },
    make('table', { class: 'mg-weights' }, caption, make('thead', {}, make('tr', {}, make('td'), ...columns)),
      make('tbody', {}, ...rows.map((head, i) => make('tr', {}, head, ...cells[i])))));

  // -- what happens --------------------------------------------------------------------------------------------------

  // what is wrong with what was typed, or ''
  function problem(text) {
    const wrong = [...text].find((c) => !/[0-9]/.test(c));
    if (wrong) return `Only the digits 0 to 9 can be sorted, and “${wrong}” is none of them.`;
    if (!text) return `Type ${many} digits, such as ${example}.`;
    return `The sorter was trained on ${many} digits, and ${text.length === 1 ? 'this is one' : `these are ${words[text.length] ?? text.length}`}.`;
  }

  const cleaned = () => digits.value.normalize('NFKC').replace(/[\s,;]+/g, '');
  const complete = (text) => /^[0-9]+$/.test(text) && text.length === length;
  const on_the_way = (text) => /^[0-9]*$/.test(text) && text.length < length;

  function tell(wrong) {
    error.textContent = wrong;
    digits.setAttribute('aria-invalid', String(Boolean(wrong)));
  }

  // say what is wrong, also if it may only be unfinished
  function complain() {
    const text = cleaned();
    tell(complete(text) ? '' : problem(text));
    return error.textContent;
  }

  // a new row
  function typed() {
    pause();
    const text = cleaned();
    tell(complete(text) || on_the_way(text) ? '' : problem(text));
    hint.textContent = on_the_way(text) ? `${text.length} of ${length} digits` : '';
    ids = complete(text) ? [...text].map(Number) : [];
    sentence.textContent = live.textContent = ids.length ? `To sort: ${ids.join(' ')}.` : '';
    verdict.textContent = '';
    compute();
  }

  function warmed() {
    const text = temperature() ? temperature().toFixed(1) : '0, always the most probable digit';
    slider_text.textContent = text;
    slider.setAttribute('aria-valuetext', text);
    if (!finished()) weigh();
    draw_bars();
  }

  // where the most probable digit is always written, the bars show the model's own probabilities
  function weigh() { shares = out && minigpt.probabilities(out.logits.subarray(-vocab_size), temperature() || 1); }

  function compute() {
    out = ids.length ? model.forward(ids.slice(0, context_length)) : null;
    if (!finished()) weigh();
    draw_tape();
    draw_bars();
    draw_maps();
    draw_table();
  }

  // one digit more
  function advance() {
    if (!out || finished()) return pause();
    const token = minigpt.sample(out.logits.subarray(-vocab_size), temperature()), share = shares[token];
    ids.push(token);
    const written = ids.slice(length), right = ids.slice(0, length).sort((a, b) => a - b);
    sentence.textContent = `Digit ${written.length} of ${length}: the model writes ${token}, with a probability of ${percent(share).replace('>', 'more than').replace('<', 'less than')}.`;
    live.textContent = timer ? String(token) : sentence.textContent;
    if (finished()) {
      verdict.textContent = right.join() === written.join() ? 'Sorted without a mistake.' : `Not sorted: it should be ${right.join(' ')}.`;
      live.textContent += ` ${verdict.textContent}`;
      pause();
    }
    compute();
  }

  function start() {
    if (complain() || finished()) return;
    timer = setInterval(advance, 700);
    play.textContent = 'Pause';
    advance();
  }

  function pause() {
    clearInterval(timer);
    timer = null;
    play.textContent = 'Play';
  }

  // -- drawing -------------------------------------------------------------------------------------------------------

  function draw_tape() {
    places.forEach((item, i) => {
      const [kind, words_before] = i < length ? ['mg-given', 'given '] : i < ids.length ? ['mg-written', 'written '] : ['mg-empty', 'empty'];
      const next = out && i === ids.length;
      item.className = next ? `${kind} mg-next` : kind;
      item.children[0].textContent = i < ids.length ? words_before : next ? 'empty, next' : 'empty';
      item.children[1].textContent = i < ids.length ? String(ids[i]) : '';
    });
    for (const button of [step, play]) button.setAttribute('aria-disabled', String(!out || finished()));
  }

  function draw_bars() {
    bars_title.textContent = finished() ? 'How the last digit was chosen' : 'What comes next';
    bars.forEach((item, digit) => {
      item.querySelector('i').style.inlineSize = `${100 * (shares?.[digit] ?? 0)}%`;
      item.querySelector('small').textContent = shares ? percent(shares[digit]) : '–';
    });
  }

  function draw_maps() {
    range(n_layers).forEach((layer) => range(n_heads).forEach((head) => {
      const weights = out?.attention_maps[layer][head];
      squares[layer][head].forEach((row, i) => row.forEach((square, j) => square.setAttribute('fill-opacity', (weights?.[i]?.[j] ?? 0).toFixed(3))));
      maps[layer][head].setAttribute('aria-pressed', String(layer === chosen[0] && head === chosen[1]));
    }));
  }

  function draw_table() {
    const weights = out?.attention_maps[chosen[0]][chosen[1]];
    caption.textContent = `${name(chosen)}: a row for each position, a column for each that it looks at`;
    range(context_length).forEach((i) => {
      rows[i].textContent = columns[i].textContent = i < ids.length ? `${i}: ${ids[i]}` : `${i}:`;
      range(context_length).forEach((j) => {
        const w = weights?.[i]?.[j];
        cells[i][j].textContent = w === undefined || j > i ? '' : w.toFixed(2);
        cells[i][j].style.setProperty('--w', w === undefined ? 0 : w.toFixed(3));
      });
    });
    say();
  }

  // -- reading a weight ----------------------------------------------------------------------------------------------

  function point(layer, head, event, box) {
    const [i, j] = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width].map((share) => Math.floor(share * context_length));
    pointed = [layer, head, i, j];
    say();
  }

  // the weight under the pointer; without one, what the last position looks at most in the chosen head
  function say() {
    places.forEach((item) => item.classList.remove('mg-query', 'mg-key'));
    if (!out) { readout.textContent = ''; return; }
    const T = out.attention_maps[0][0].length;
    let [layer, head, i, j] = pointed ?? [...chosen, T - 1, -1];
    if (i < 0 || i >= T || (pointed && (j < 0 || j >= T))) [layer, head, i, j] = [...chosen, T - 1, -1];
    const row = out.attention_maps[layer][head][i], most = j < 0;
    if (most) j = row.indexOf(Math.max(...row));
    places[i].classList.add('mg-query');
    if (j <= i) places[j].classList.add('mg-key');
    readout.textContent = j > i
      ? `${name([layer, head])}: ${place(i)} cannot look at position ${j}, which comes later.`
      : `${name([layer, head])}: ${place(i)} looks ${most ? 'most ' : ''}at ${place(j)} with weight ${row[j].toFixed(3)}.`;
  }

  grid.style.setProperty('--heads', n_heads);
  tape.style.setProperty('--places', 2 * length);
  root.replaceChildren(form, tape, sentence, verdict, live, bars_title, make('ol', { class: 'mg-bars', role: 'list', 'aria-label': 'Probability of each digit' }, ...bars),
    make('h2', {}, 'Attention: a row per layer, a square per head'), grid, readout, table);
  window.minigptSorter = model;
  digits.value = example;
  typed();
  warmed();
})();
