// Norms and rotates a query head of a token in place, group.x < N_HEADS; or norms and rotates a key, and writes it and
// its value to the token's page.
@group(0) @binding(0) var<storage, read> tokens: array<vec4i>;
@group(0) @binding(1) var<storage, read> page_table: array<i32>;
@group(0) @binding(2) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(3) var<storage, read_write> kv: array<u32>;
@group(0) @binding(4) var<storage, read> rotation: array<f32>;  // sin and cos of WGSL are too coarse
@group(0) @binding(5) var<storage, read> q_norm: array<f32>;
@group(0) @binding(6) var<storage, read> k_norm: array<f32>;
@group(0) @binding(7) var<storage, read> query_scales: array<f32>;
var<workgroup> head: array<f32, D>;

// 1 / RMS of the head; all lanes call it.
fn inverse_rms(lane: u32) -> f32 {
  var squares = 0.0;
  for (var e = lane; e < D; e += 64u) { squares += head[e] * head[e]; }
  return 1.0 / sqrt(total(lane, squares) / f32(D) + EPS);
}

fn load(at: u32, lane: u32) {
  workgroupBarrier();
  for (var e = lane; e < D; e += 64u) { head[e] = qkv[at + e]; }
  workgroupBarrier();
}

fn norm(is_query: bool, lane: u32) {
  let scale = inverse_rms(lane);
  for (var e = lane; e < D; e += 64u) { head[e] *= scale * select(k_norm[e], q_norm[e], is_query); }
  workgroupBarrier();
}

fn rotate(token: u32, lane: u32) {
  let half = ROTARY_DIM / 2u;
  for (var i = lane; i < half; i += 64u) {
    let c = rotation[token * ROTARY_DIM + i];
    let s = rotation[token * ROTARY_DIM + half + i];
    let a = select(2u * i, i, IS_NEOX);
    let b = select(2u * i + 1u, i + half, IS_NEOX);
    let first = head[a];
    let second = head[b];
    head[a] = first * c - second * s;
    head[b] = second * c + first * s;
  }
  workgroupBarrier();
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let is_query = group.x < N_HEADS;
  let kv_head = group.x - N_HEADS;
  let row = group.y * QKV_DIM;
  let at = row + select(N_HEADS * QUERY_STRIDE + kv_head * D, group.x * QUERY_STRIDE, is_query);
  load(at, lane);
  if (NORM_BEFORE) { norm(is_query, lane); }
  if (ROTARY_DIM > 0u) { rotate(group.y, lane); }
  if (NORM_AFTER) { norm(is_query, lane); }
  if (is_query) {
    var scale = 1.0;
    if (SCALES_QUERIES) { scale = query_scales[group.y]; }
    for (var e = lane; e < D; e += 64u) { qkv[at + e] = scale * head[e]; }
    return;
  }
  let token = tokens[group.y];
  let slot = u32(token.y) % 64u;
  let page = page_at(page_table[u32(token.z) + u32(token.y) / 64u], kv_head);
  for (var w = lane; w < KV_WORDS; w += 64u) {
    var second = 0.0;
    if (KV_BF16 && 2u * w + 1u < D) { second = head[2u * w + 1u]; }
    kv[page + w * 64u + slot] = pack(head[ELEMENTS * w], second);
  }
  load(at + N_KV_HEADS * D, lane);
  var scale = 1.0;
  if (NORM_VALUES) { scale = inverse_rms(lane); }
  for (var w = lane; w < KV_WORDS; w += 64u) {
    var second = 0.0;
    if (KV_BF16 && 2u * w + 1u < D) { second = head[2u * w + 1u]; }
    kv[page + HEAD_WORDS + slot * KV_WORDS + w] = pack(scale * head[ELEMENTS * w], scale * second);
  }
}
