// The page "Watch it sort": controls, tape, bars and attention around the forward pass in sorter.js.
(() => {
  'use strict';
  const root = document.getElementById('watch');
  if (!root || !window.minigptWeights) return;
  const model = minigpt.load(window.minigptWeights);
  const { context_length, vocab_size, n_layers, n_heads } = model.config;
  const length = (context_length + 1) / 2;  // digits to sort
  const words = ['no', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten'];
  const many = words[length] ?? String(length);

  // an element with attributes and children; a name that starts with on is a listener
  const svg_tags = new Set(['svg', 'rect']);
  function make(tag, attributes = {}, ...children) {
    const e = svg_tags.has(tag) ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith('on')) e.addEventListener(name.slice(2), value); else e.setAttribute(name, value);
    }
    e.append(...children);
    return e;
  }

  // -- the parts of the page -----------------------------------------------------------------------------------------

  const digits = make('input', { id: 'watch-digits', inputmode: 'numeric', autocomplete: 'off', spellcheck: 'false', size: 8, oninput: typed, 'aria-describedby': 'watch-error' });
  const temperature = make('input', { id: 'watch-temperature', type: 'range', min: 0, max: 2, step: 0.1, value: 0, oninput: warmed });
  const shown_temperature = make('output', { for: 'watch-temperature' });
  const shuffle = make('button', { type: 'button', onclick: () => { digits.value = random_digits(); typed(); } }, 'Shuffle');
  const step = make('button', { type: 'submit' }, 'Step');
  const play = make('button', { type: 'button', 'aria-pressed': 'false', onclick: () => (timer ? pause() : start()) }, 'Play');
  const again = make('button', { type: 'button', onclick: () => typed() }, 'Start again');
  const error = make('p', { id: 'watch-error', class: 'mg-watch-error', role: 'alert' });
  const status = make('p', { class: 'mg-watch-status', role: 'status' });
  const tape = make('ol', { class: 'mg-tape', 'aria-label': 'The sequence' });
  const bars = make('ol', { class: 'mg-bars', 'aria-label': 'Probability of each digit to come next' });
  const maps = make('div', { class: 'mg-maps' });
  const readout = make('p', { class: 'mg-readout' });
  const detail = make('div', { class: 'mg-scroll', role: 'region', tabindex: 0, 'aria-label': 'All weights of the chosen head' });
  const form = make('form', { class: 'mg-watch-controls', onsubmit: (e) => { e.preventDefault(); pause(); advance(); } },
    make('p', {}, make('label', { for: 'watch-digits' }, `${many[0].toUpperCase()}${many.slice(1)} digits `), digits, ' ', shuffle),
    make('p', {}, step, ' ', play, ' ', again),
    make('p', {}, make('label', { for: 'watch-temperature' }, 'Temperature '), temperature, ' ', shown_temperature));
  root.replaceChildren(form, error, tape, status,
    make('h2', {}, 'What comes next'), bars,
    make('h2', {}, 'Where each position looks, a row of heads for each layer'), maps, readout, detail);

  // -- the state -----------------------------------------------------------------------------------------------------

  let ids = [], out = null, timer = null, selected = [Math.floor(n_layers / 2), 0];
  const finished = () => ids.length === 2 * length;
  const number = (share) => (share > 0.9995 && share < 1 ? '> 99.9 %' : `${(100 * share).toFixed(1)} %`);
  const random_digits = () => Array.from({ length }, () => Math.floor(Math.random() * vocab_size)).join('');
  const at = () => Number(temperature.value);

  // what is wrong with what was typed, or ''
  function problem(text) {
    if (!text) return `Type ${many} digits, such as ${'314159265358'.slice(0, length)}.`;
    const wrong = [...text].find((c) => !/[0-9]/.test(c));
    if (wrong) return `Only digits can be sorted, and “${wrong}” is none.`;
    if (text.length !== length) return `The sorter was trained on ${many} digits, and ${text.length === 1 ? 'this is one' : `these are ${words[text.length] ?? text.length}`}.`;
    return '';
  }

  function typed() {
    pause();
    const text = digits.value.replace(/[\s,;]+/g, ''), wrong = problem(text);
    error.textContent = wrong;
    digits.setAttribute('aria-invalid', wrong ? 'true' : 'false');
    for (const button of [step, play, again]) button.disabled = Boolean(wrong);
    ids = wrong ? [] : [...text].map(Number);
    status.textContent = wrong ? '' : `${ids.join(' ')} is to be sorted.`;
    compute();
  }

  function warmed() {
    shown_temperature.textContent = at() ? at().toFixed(1) : '0, always the most probable digit';
    draw();
  }

  function compute() {
    out = ids.length ? model.forward(ids.slice(0, context_length)) : null;
    draw();
  }

  // what the bars show; where the choice is always the most probable digit, the model's own probabilities
  const next_shares = () => (out && !finished() ? minigpt.probabilities(out.logits.subarray(-vocab_size), at() || 1) : Array(vocab_size).fill(0));

  // one digit more
  function advance() {
    if (!out) return;
    if (finished()) return typed();
    const shares = next_shares(), token = minigpt.sample(out.logits.subarray(-vocab_size), at());
    ids.push(token);
    const written = ids.slice(length);
    let sentence = `Digit ${written.length} of ${length}: the model writes ${token}, with probability ${number(shares[token])}.`;
    if (finished()) {
      const right = [...ids.slice(0, length)].sort((a, b) => a - b);
      sentence += right.every((v, i) => v === written[i]) ? ' Sorted without a mistake.' : ` That is not sorted: it should be ${right.join(' ')}.`;
      pause();
    }
    status.textContent = sentence;
    compute();
  }

  function start() {
    if (finished()) typed();
    timer = setInterval(advance, 700);
    play.textContent = 'Pause';
    play.setAttribute('aria-pressed', 'true');
    advance();
  }

  function pause() {
    clearInterval(timer);
    timer = null;
    play.textContent = 'Play';
    play.setAttribute('aria-pressed', 'false');
  }

  // -- drawing -------------------------------------------------------------------------------------------------------

  function draw() {
    draw_tape();
    draw_bars();
    draw_maps();
    draw_detail();
  }

  function draw_tape() {
    const places = Array.from({ length: 2 * length }, (_, i) => {
      const kind = i < length ? 'mg-given' : i < ids.length ? 'mg-written' : 'mg-empty';
      return make('li', { class: i === ids.length && out ? `${kind} mg-next` : kind }, i < ids.length ? String(ids[i]) : '·');
    });
    tape.replaceChildren(...places);
  }

  function draw_bars() {
    const shares = next_shares();
    if (!bars.children.length) {
      bars.append(...shares.map((_, digit) => make('li', {}, make('b', {}, String(digit)), make('span', { class: 'mg-bar', 'aria-hidden': 'true' }, make('i')), make('small'))));
    }
    shares.forEach((share, digit) => {
      const item = bars.children[digit];
      item.querySelector('i').style.inlineSize = `${100 * share}%`;
      item.querySelector('small').textContent = out && !finished() ? number(share) : '–';
    });
  }

  const name = ([layer, head]) => `Layer ${layer}, head ${head}`;

  function draw_maps() {
    const focused = [...maps.querySelectorAll('button')].indexOf(document.activeElement);
    maps.replaceChildren();
    if (!out) return;
    out.attention_maps.forEach((heads, layer) => { maps.append(make('span', { 'aria-hidden': 'true' }, String(layer))); heads.forEach((weights, head) => {
      const T = weights.length, squares = [];
      weights.forEach((row, i) => row.forEach((w, j) => {
        if (w > 0.004) squares.push(make('rect', { x: j, y: i, width: 1, height: 1, 'fill-opacity': w.toFixed(3) }));
      }));
      const picture = make('svg', { viewBox: `0 0 ${T} ${T}`, 'aria-hidden': 'true', onpointermove: (e) => point(e, [layer, head], picture), onpointerleave: () => say_row() }, ...squares);
      const chosen = layer === selected[0] && head === selected[1];
      maps.append(make('button', { type: 'button', 'aria-pressed': String(chosen), 'aria-label': name([layer, head]), onclick: () => { selected = [layer, head]; draw_maps(); draw_detail(); } }, picture));
    }); });
    if (focused >= 0) maps.querySelectorAll('button')[focused]?.focus();
  }

  const place = (i) => `position ${i}, ${i < length ? 'the given' : 'the written'} ${ids[i]},`;

  // the weight under the pointer
  function point(event, which, picture) {
    const box = picture.getBoundingClientRect(), weights = out.attention_maps[which[0]][which[1]], T = weights.length;
    const j = Math.floor((event.clientX - box.left) / box.width * T), i = Math.floor((event.clientY - box.top) / box.height * T);
    if (weights[i]?.[j] === undefined) return;
    readout.textContent = j > i
      ? `${name(which)}: ${place(i)} cannot look at position ${j}, which comes later.`
      : `${name(which)}: ${place(i)} looks at ${place(j)} with weight ${weights[i][j].toFixed(3)}.`;
  }

  // without a pointer: what the last position looks at most, in the chosen head
  function say_row() {
    if (!out) { readout.textContent = ''; return; }
    const row = out.attention_maps[selected[0]][selected[1]].at(-1), j = row.indexOf(Math.max(...row));
    readout.textContent = `${name(selected)}: ${place(row.length - 1)} looks most at ${place(j)} with weight ${row[j].toFixed(3)}.`;
  }

  function draw_detail() {
    say_row();
    detail.replaceChildren();
    if (!out) return;
    const weights = out.attention_maps[selected[0]][selected[1]], labels = ids.slice(0, weights.length);
    detail.append(make('table', { class: 'mg-weights' },
      make('caption', {}, `${name(selected)}: a row for each position, a column for each that it looks at`),
      make('thead', {}, make('tr', {}, make('td'), ...labels.map((id) => make('th', { scope: 'col' }, String(id))))),
      make('tbody', {}, ...weights.map((row, i) => make('tr', {}, make('th', { scope: 'row' }, String(labels[i])),
        ...row.map((w, j) => make('td', { style: `--w: ${w.toFixed(3)}` }, j > i ? '' : w.toFixed(2))))))));
  }

  maps.style.setProperty('--heads', n_heads);
  tape.style.setProperty('--places', 2 * length);
  window.minigptSorter = model;
  digits.value = '314159265358'.slice(0, length);
  warmed();
  typed();
})();
