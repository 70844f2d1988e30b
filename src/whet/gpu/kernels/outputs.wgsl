// y = SCALE (value + bias) for outputs FIRST ... FIRST + COUNT of rows of Y_STRIDE; ADDS: y += it. HAS_NUMBER: only for
// tokens of this adapter.
@group(0) @binding(0) var<storage, read> weights: array<u32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;
@group(0) @binding(4) var<storage, read> params: array<u32>;
@group(0) @binding(5) var<storage, read> number: array<i32>;
@group(0) @binding(6) var<storage, read> tokens: array<vec4i>;

fn put(row: u32, output: u32, product: f32) {
  if (output >= COUNT || row >= params[N_PARAM]) { return; }
  var value = product;
  if (HAS_BIAS) { value += bias[FIRST + output]; }
  value *= SCALE;
  if (SOFTCAP > 0.0) { value = SOFTCAP * tanh(clamp(value / SOFTCAP, -20.0, 20.0)); }
  if (HAS_NUMBER) {
    if (tokens[row].w != number[0]) { return; }
  }
  let place = row * Y_STRIDE + FIRST + output;
  if (ADDS) { value += y[place]; }
  y[place] = value;
}
