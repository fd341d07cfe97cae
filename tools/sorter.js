// The trained sorter, in the reader's browser: the forward pass of the package, part by part, to be read beside chapters 1 to 4.
// Left out is what the page does not need: batches, dropout, training, the cache, top-k and top-p.
// A matrix is a Float32Array of rows. T is the number of positions, C the width of the stream, d that of a head, V the vocabulary.
'use strict';

const minigpt = (() => {

  // -- chapter 1: layers ---------------------------------------------------------------------------------------------

  // scores -> shares that add up to one; the largest score is subtracted first, so that nothing overflows
  function softmax(x) {
    const peak = Math.max(...x);
    const weights = Array.from(x, (v) => Math.exp(v - peak));
    const total = weights.reduce((sum, v) => sum + v, 0);
    return weights.map((v) => v / total);
  }

  // (T, d_in) -> (T, d_out): x @ weight.T + bias, where weight has a row per output
  function linear(x, { weight, bias }) {
    const [d_out, d_in] = weight.shape, T = x.length / d_in, w = weight.data;
    const y = new Float32Array(T * d_out);
    for (let t = 0; t < T; t++) {
      for (let o = 0; o < d_out; o++) {
        let sum = bias ? bias.data[o] : 0;
        for (let i = 0, a = t * d_in, b = o * d_in; i < d_in; i++) sum += x[a + i] * w[b + i];
        y[t * d_out + o] = sum;
      }
    }
    return y;
  }

  // the rows of a table that the ids name, (T) -> (T, C)
  function embedding(ids, { weight }) {
    const C = weight.shape[1], x = new Float32Array(ids.length * C);
    ids.forEach((id, t) => x.set(weight.data.subarray(id * C, id * C + C), t * C));
    return x;
  }

  // each row to mean 0 and variance 1, then scaled and shifted
  function layer_norm(x, { weight, bias }, eps = 1e-5) {
    const d = weight.data.length, y = new Float32Array(x.length);
    for (let start = 0; start < x.length; start += d) {
      let mean = 0, variance = 0;
      for (let i = 0; i < d; i++) mean += x[start + i] / d;
      for (let i = 0; i < d; i++) variance += (x[start + i] - mean) ** 2 / d;
      const scale = 1 / Math.sqrt(variance + eps);
      for (let i = 0; i < d; i++) y[start + i] = (x[start + i] - mean) * scale * weight.data[i] + bias.data[i];
    }
    return y;
  }

  // the error function, from a series whose terms have one sign; JavaScript has none
  function erf(x) {
    if (Math.abs(x) > 5) return Math.sign(x);
    let term = x, sum = x;
    for (let n = 1; Math.abs(term) > 1e-10 * Math.abs(sum); n++) {
      term *= 2 * x * x / (2 * n + 1);
      sum += term;
    }
    return 2 / Math.sqrt(Math.PI) * Math.exp(-x * x) * sum;
  }

  // x * Phi(x), exactly
  const gelu = (x) => x.map((v) => 0.5 * v * (1 + erf(v / Math.SQRT2)));

  // -- chapter 2: attention ------------------------------------------------------------------------------------------

  // the share of each key in each query's output; only keys up to the query's own position are asked: the causal mask
  function attention_weights(q, k, T, d) {
    const weights = [];
    for (let i = 0; i < T; i++) {
      const scores = [];
      for (let j = 0; j <= i; j++) {
        let dot = 0;
        for (let c = 0; c < d; c++) dot += q[i * d + c] * k[j * d + c];
        scores.push(dot / Math.sqrt(d));
      }
      weights.push([...softmax(scores), ...Array(T - 1 - i).fill(0)]);
    }
    return weights;
  }

  // each query's mixture of the values
  function sdpa(q, k, v, T, d) {
    const weights = attention_weights(q, k, T, d), y = new Float32Array(T * d);
    for (let i = 0; i < T; i++) {
      for (let j = 0; j <= i; j++) {
        for (let c = 0; c < d; c++) y[i * d + c] += weights[i][j] * v[j * d + c];
      }
    }
    return { y, weights };
  }

  // (T, C) -> for each head (T, d): C channels read as heads side by side
  function split_heads(x, C, n_heads) {
    const T = x.length / C, d = C / n_heads;
    return Array.from({ length: n_heads }, (_, h) => {
      const head = new Float32Array(T * d);
      for (let t = 0; t < T; t++) head.set(x.subarray(t * C + h * d, t * C + h * d + d), t * d);
      return head;
    });
  }

  // the inverse
  function join_heads(heads, T, d) {
    const C = heads.length * d, x = new Float32Array(T * C);
    heads.forEach((head, h) => {
      for (let t = 0; t < T; t++) x.set(head.subarray(t * d, t * d + d), t * C + h * d);
    });
    return x;
  }

  // `MultiHeadAttention.forward`: one fused projection to queries, keys and values, which are its three thirds
  function multi_head_attention(x, attn, n_heads) {
    const C = attn.proj.weight.shape[0], T = x.length / C, d = C / n_heads;
    const thirds = split_heads(linear(x, attn.qkv), 3 * C, 3);  // not heads, but cut in the same way
    const [q, k, v] = thirds.map((third) => split_heads(third, C, n_heads));
    const heads = q.map((_, h) => sdpa(q[h], k[h], v[h], T, d));
    return { y: linear(join_heads(heads.map((head) => head.y), T, d), attn.proj), maps: heads.map((head) => head.weights) };
  }

  // -- chapter 3: the model ------------------------------------------------------------------------------------------

  const add = (x, y) => x.map((v, i) => v + y[i]);

  // `FeedForward.forward`
  const feed_forward = (x, ff) => linear(gelu(linear(x, ff.fc)), ff.proj);

  // `Block.forward`: x = x + attn(ln_1(x)), then x = x + ff(ln_2(x))
  function block_forward(x, block, n_heads) {
    const { y, maps } = multi_head_attention(layer_norm(x, block.ln_1), block.attn, n_heads);
    x = add(x, y);
    x = add(x, feed_forward(layer_norm(x, block.ln_2), block.ff));
    return { x, maps };
  }

  class GPT {
    // config as in `GPTConfig`; weights: name, as in the state dict, -> { shape, data }
    constructor(config, weights) {
      this.config = config;
      for (const [name, tensor] of Object.entries(weights)) {
        const path = name.split('.');
        const last = path.pop();
        path.reduce((part, piece) => (part[piece] ??= {}), this)[last] = tensor;  // this.blocks[0].attn.qkv.weight
      }
    }

    // ids (T) -> logits (T, V), and the attention weights of every layer and head, (T, T) each
    forward(ids) {
      const { context_length, vocab_size, n_layers, n_heads } = this.config;
      if (!ids.length || ids.length > context_length) throw new RangeError(`1 to ${context_length} ids fit, not ${ids.length}`);
      if (ids.some((id) => !(Number.isInteger(id) && id >= 0 && id < vocab_size))) throw new RangeError(`ids must lie in 0..${vocab_size - 1}`);
      let x = add(embedding(ids, this.token_embedding), embedding(ids.map((_, t) => t), this.position_embedding));
      const attention_maps = [];
      for (let i = 0; i < n_layers; i++) {
        const out = block_forward(x, this.blocks[i], n_heads);
        x = out.x;
        attention_maps.push(out.maps);
      }
      return { logits: linear(layer_norm(x, this.ln_f), this.lm_head), attention_maps };
    }
  }

  // -- chapter 4: generation -----------------------------------------------------------------------------------------

  // the probability of each token; at temperature 0 the most probable one has it all
  function probabilities(logits, temperature) {
    if (temperature > 0) return softmax(Array.from(logits, (v) => v / temperature));
    const best = logits.indexOf(Math.max(...logits));
    return Array.from(logits, (_, i) => (i === best ? 1 : 0));
  }

  // one token; `random` gives numbers in [0, 1)
  function sample(logits, temperature = 1, random = Math.random) {
    const shares = probabilities(logits, temperature);
    const dart = random();
    let end = 0;
    for (let i = 0; i < shares.length; i++) {
      end += shares[i];
      if (dart < end) return i;
    }
    return shares.lastIndexOf(Math.max(...shares));  // the shares add up to a little less than one, and the dart fell behind them
  }

  // ids with n more, each from what the model says about the last position
  function generate(model, ids, n, temperature = 1, random = Math.random) {
    for (let i = 0; i < n; i++) {
      const { vocab_size: V, context_length } = model.config, { logits } = model.forward(ids.slice(-context_length));
      ids = [...ids, sample(logits.subarray(-V), temperature, random)];
    }
    return ids;
  }

  // -- the file ------------------------------------------------------------------------------------------------------

  // numbers of 16 bits: sign, 5 bits of exponent, 10 of fraction
  function half(bits) {
    const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    return exponent === 0 ? sign * fraction * 2 ** -24 : sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }

  // what the builder wrote from the trained sorter: { config, origin, shapes, data }, data being base64 of all weights in order
  function load({ config, shapes, data }) {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0)), weights = {};
    let at = 0;
    for (const [name, shape] of Object.entries(shapes)) {
      const n = shape.reduce((a, b) => a * b, 1), values = new Float32Array(n);
      for (let i = 0; i < n; i++, at += 2) values[i] = half(bytes[at] | (bytes[at + 1] << 8));
      weights[name] = { shape, data: values };
    }
    return new GPT(config, weights);
  }

  return { softmax, linear, embedding, layer_norm, erf, gelu, attention_weights, sdpa, multi_head_attention, feed_forward, GPT, probabilities, sample, generate, load };
})();
