// A causal convolution of LENGTH taps over the tokens of each run, by channel: out = C conv(B x) for rows [B, C, x]
// (IS_GATED), or out = silu(conv(x) + bias). The last token of a run keeps the last inputs in the state after it, the
// input at position p in row p % LENGTH.
@group(0) @binding(0) var<storage, read> taps: array<f32>;  // tap j of channel c is number 16 c + j
@group(0) @binding(1) var<storage, read> runs: array<Run>;
@group(0) @binding(2) var<storage, read> rows: array<f32>;
@group(0) @binding(3) var<storage, read_write> states: array<f32>;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

fn input(row: u32, channel: u32) -> f32 {
  let at = row * IN_STRIDE + channel;
  if (IS_GATED) { return rows[at] * rows[at + 2u * CHANNELS]; }
  return rows[at + IN_FIRST];
}
fn kept(state: i32, position: u32, channel: u32) -> u32 {
  return u32(state) * STATE_WORDS + position % LENGTH * CHANNELS + channel;
}
fn input_at(run: Run, position: u32, channel: u32) -> f32 {
  if (position >= run.start) { return input(run.first + position - run.start, channel); }
  return states[kept(run.before, position, channel)];
}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  let channel = id.x;
  if (channel >= CHANNELS) { return; }
  let run = runs[id.y];
  let end = run.start + id.y - run.first + 1u;
  var sum = 0.0;
  for (var j = 0u; j < LENGTH; j++) {
    if (end + j >= LENGTH) { sum += taps[16u * channel + j] * input_at(run, end + j - LENGTH, channel); }
  }
  if (id.y == run.first + run.n - 1u) {
    for (var p = end - min(end, LENGTH); p < end; p++) {
      if (p >= run.start || run.before != run.after) { states[kept(run.after, p, channel)] = input_at(run, p, channel); }
    }
  }
  if (IS_GATED) {
    out[id.y * CHANNELS + channel] = sum * rows[id.y * IN_STRIDE + CHANNELS + channel];
  } else {
    if (HAS_BIAS) { sum += bias[channel]; }
    out[id.y * CHANNELS + channel] = sum / (1.0 + exp(-sum));
  }
}
