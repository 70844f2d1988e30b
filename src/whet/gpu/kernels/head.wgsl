// Heads of a token's queries, keys and values: each team of 64 lanes has one. All lanes of a workgroup call a function.
// Head i is one of the queries, i < N_HEADS, or one of the keys, of which a layer with its own has N_OWN.
@group(0) @binding(0) var<storage, read> tokens: array<vec4i>;
@group(0) @binding(1) var<storage, read> page_table: array<i32>;
@group(0) @binding(2) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(3) var<storage, read_write> kv: array<u32>;
@group(0) @binding(4) var<storage, read> rotation: array<f32>;  // sin and cos of WGSL are too coarse
@group(0) @binding(5) var<storage, read> vectors: array<f32>;   // the norms of queries and keys, then sinks
const TEAMS = 4u;
var<workgroup> head: array<f32, TEAMS * D>;

fn load(at: u32, team: u32, lane: u32) {
  workgroupBarrier();
  for (var e = lane; e < D; e += 64u) { head[team * D + e] = qkv[at + e]; }
  workgroupBarrier();
}

fn inverse_rms(team: u32) -> f32 {
  var squares = 0.0;
  for (var e = 0u; e < D; e++) { squares += head[team * D + e] * head[team * D + e]; }
  return 1.0 / sqrt(squares / f32(D) + EPS);
}

fn norm(weights: u32, team: u32, lane: u32) {
  let scale = inverse_rms(team);
  workgroupBarrier();
  for (var e = lane; e < D; e += 64u) { head[team * D + e] *= scale * vectors[weights + e]; }
  workgroupBarrier();
}

fn rotate(row: u32, team: u32, lane: u32) {
  let half = ROTARY_DIM / 2u;
  for (var i = lane; i < half; i += 64u) {
    let c = rotation[row * ROTATION_STRIDE + i];
    let s = rotation[row * ROTATION_STRIDE + half + i];
    let a = team * D + select(2u * i, i, IS_NEOX);
    let b = team * D + select(2u * i + 1u, i + half, IS_NEOX);
    let first = head[a];
    let second = head[b];
    head[a] = first * c - second * s;
    head[b] = second * c + first * s;
  }
  workgroupBarrier();
}

fn head_at(row: u32, i: u32) -> u32 {
  return row * QKV_DIM + select(N_HEADS * QUERY_STRIDE + (i - N_HEADS) * D, i * QUERY_STRIDE, i < N_HEADS);
}
// Reads, norms and rotates head i of a row.
fn prepare(row: u32, i: u32, team: u32, lane: u32) {
  load(head_at(row, i), team, lane);
  let weights = select(D, 0u, i < N_HEADS);
  if (NORM_BEFORE) { norm(weights, team, lane); }
  if (ROTARY_DIM > 0u) { rotate(row, team, lane); }
  if (NORM_AFTER) { norm(weights, team, lane); }
}
// The factor of the queries follows the rotation.
fn query_scale(row: u32) -> f32 { return rotation[row * ROTATION_STRIDE + ROTATION_STRIDE - 1u]; }

// Writes the prepared head i and its value to the token's page, where `writes` and it is a key.
fn append(row: u32, i: u32, writes: bool, team: u32, lane: u32) {
  let token = tokens[row];
  let kv_head = i - N_HEADS;
  let is_written = writes && i >= N_HEADS;
  let slot = u32(token.y) % 64u;
  let page = page_at(page_table[u32(token.z) + u32(token.y) / 64u], kv_head);
  for (var w = lane; w < KV_WORDS && is_written; w += 64u) { kv[page + w * 64u + slot] = word(w, 1.0, team); }
  load(head_at(row, i) + select(0u, N_OWN * D, is_written), team, lane);
  var scale = 1.0;
  if (NORM_VALUES) { scale = inverse_rms(team); }
  for (var w = lane; w < KV_WORDS && is_written; w += 64u) {
    kv[page + HEAD_WORDS + slot * KV_WORDS + w] = word(w, scale, team);
  }
}
// Word w of the head as keys and values are stored.
fn word(w: u32, scale: f32, team: u32) -> u32 {
  var second = 0.0;
  if (KV_BF16 && 2u * w + 1u < D) { second = scale * head[team * D + 2u * w + 1u]; }
  return pack(scale * head[team * D + ELEMENTS * w], second);
}
