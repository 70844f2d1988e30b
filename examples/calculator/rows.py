"""Print conversations that show the form of a call: sums of two terms with one or two digits, and a calculator.

python examples/calculator/rows.py > calls.jsonl
"""

import json

from calculator import calculate

from whet.tasks import make_prompt, open_task
from whet.tasks.schemas import tool_schema

task = open_task("reasoning_gym:chain_sum,min_terms=2,max_terms=2,min_digits=1,max_digits=2", size=200)
for row in task.rows:
    expression = row["metadata"]["expression"]
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": expression}}}
    result = str(calculate(expression))
    messages = [
        *make_prompt(task, row),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]
    print(json.dumps({"messages": messages, "tools": [tool_schema(calculate)]}))
