// The gated delta rule, or Mamba-2 (kernels/delta_rule.h), of a value head over the tokens of a run: a lane has a column
// of the state (KEY_DIM, VALUE_DIM). After the columns, a state has the number of tokens up to it: a step may be
// repeated after the state before it has been replaced.
@group(0) @binding(0) var<storage, read> rows: array<f32>;   // of the first matrix: b and a of the heads
@group(0) @binding(1) var<storage, read> mixed: array<f32>;  // q, k and v after their convolution
@group(0) @binding(2) var<storage, read> runs: array<Run>;
@group(0) @binding(3) var<storage, read_write> states: array<f32>;
@group(0) @binding(4) var<storage, read> head_decay: array<f32>;
@group(0) @binding(5) var<storage, read> dt_bias: array<f32>;
@group(0) @binding(6) var<storage, read> skip: array<f32>;
@group(0) @binding(7) var<storage, read_write> out: array<f32>;
const COLUMN_GROUPS = (VALUE_DIM + 63u) / 64u;
const HEAD_WORDS = KEY_DIM * VALUE_DIM + COLUMN_GROUPS;
var<workgroup> query: array<f32, KEY_DIM>;
var<workgroup> key: array<f32, KEY_DIM>;

// Advances a column of the state by a token, and writes the token's result.
fn step_column(run: Run, t: u32, head: u32, column: u32, from_state: u32, to_state: u32, is_repeated: bool) {
  let row = run.first + t;
  var query_scale = 1.0;
  var key_scale = 1.0;
  if (!IS_MAMBA) {
    var squares = vec2f(1e-6);
    for (var i = 0u; i < KEY_DIM; i++) { squares += vec2f(query[i] * query[i], key[i] * key[i]); }
    query_scale = 1.0 / sqrt(squares.x * f32(KEY_DIM));
    key_scale = 1.0 / sqrt(squares.y);
  }
  let z = rows[row * IN_STRIDE + A + head] + dt_bias[head];
  let size = max(select(log(1.0 + exp(z)), z, z > 40.0), STEP_MIN);
  let decay = exp(head_decay[head] * size);
  let beta = select(1.0 / (1.0 + exp(-rows[row * IN_STRIDE + B + head])), size, IS_MAMBA);
  let v = mixed[row * CHANNELS + VALUE + head * VALUE_DIM + column];
  let before = select(to_state, from_state, t == 0u) + column;
  let has_before = t > 0u || run.before >= 0;
  var sum = 0.0;
  if (!IS_MAMBA && has_before && !is_repeated) {
    for (var i = 0u; i < KEY_DIM; i++) { sum += key[i] * states[before + i * VALUE_DIM]; }
  }
  let u = beta * (v - decay * key_scale * sum) * key_scale;
  var result = 0.0;
  for (var i = 0u; i < KEY_DIM; i++) {
    let at = to_state + column + i * VALUE_DIM;
    var state = states[at];
    if (!is_repeated) {
      state = key[i] * u;
      if (has_before) { state += decay * states[before + i * VALUE_DIM]; }
      states[at] = state;
    }
    result += query[i] * state;
  }
  result *= query_scale;
  if (IS_MAMBA) { result += skip[head] * v; }
  out[row * N_HEADS * VALUE_DIM + head * VALUE_DIM + column] = result;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let run = runs[group.y];
  if (run.first != group.y) { return; }
  let head = group.x / COLUMN_GROUPS;
  let column = group.x % COLUMN_GROUPS * 64u + lane;
  let key_head = select(head / (N_HEADS / N_KEY_HEADS), head % N_KEY_HEADS, IS_TILED);
  let from_state = u32(max(run.before, 0)) * STATE_WORDS + FIRST_HEAD + head * HEAD_WORDS;
  let to_state = u32(run.after) * STATE_WORDS + FIRST_HEAD + head * HEAD_WORDS;
  let length_at = to_state + KEY_DIM * VALUE_DIM + group.x % COLUMN_GROUPS;
  let end = run.start + run.n;
  let is_repeated = run.before == run.after && u32(states[length_at]) == end;
  for (var t = 0u; t < run.n; t++) {
    let row = group.y + t;
    workgroupBarrier();
    for (var i = lane; i < KEY_DIM; i += 64u) {
      query[i] = mixed[row * CHANNELS + QUERY + key_head * KEY_DIM + i];
      key[i] = mixed[row * CHANNELS + KEY + key_head * KEY_DIM + i];
    }
    workgroupBarrier();
    if (column < VALUE_DIM) { step_column(run, t, head, column, from_state, to_state, is_repeated); }
  }
  if (lane == 0u) { states[length_at] = f32(end); }
}
