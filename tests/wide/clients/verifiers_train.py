"""verifiers: rollouts by token ids, whose log-probs are the engine's.

python verifiers_train.py URL FACTS, with WHET_MODEL, a folder, in the environment
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1], os.environ["WHET_MODEL"]
TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class Task(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def reward(self, trace: vf.Trace) -> float:
        return 1.0

class Sums(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self) -> list[Task]:
        return [Task(Data(idx=i, name=f"sum{i}", prompt=f"{i}+1="), self.config.task) for i in range(2)]

__all__ = ["Sums"]
"""
COMMAND = [
    str(Path(sys.executable).with_name("vf-eval")), "sums", "-m", "tiny", "-n", "2", "-r", "2", "--no-push",
    "--no-rich", "--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess", "--client.type", "train",
    "--client.renderer-model-name", MODEL, "--client.base-url", URL + "/v1", "--client.api-key-var", "WHET_KEY",
    "--sampling.max-tokens", "16",
]  # fmt: skip

with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "sums.py").write_text(TASKSET)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # it starts uv
    environment = {**os.environ, "PYTHONPATH": folder, "PATH": path, "WHET_KEY": "none"}
    subprocess.run(COMMAND, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    [written] = Path(folder).rglob("traces.jsonl")
    episodes = [json.loads(line) for line in written.read_text().splitlines()]
traces = [trace for episode in episodes for trace in episode["traces"]]
assert len(traces) == 4 and not any(episode["errors"] for episode in episodes), episodes
rows = []
for trace in traces:
    ids = [token for node in trace["nodes"] for token in node["token_ids"]]
    mask = [is_sampled for node in trace["nodes"] for is_sampled in node["mask"]]
    logprobs = [value for node in trace["nodes"] for value in node["logprobs"]]
    assert len(ids) == len(mask) and sum(mask) == len(logprobs) > 0
    rows.append({"token_ids": ids, "start": mask.index(True), "logprobs": logprobs})
print(json.dumps(rows))
