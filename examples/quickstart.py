"""Compare FedProto with training alone: twenty clients, each with a few digits and its own network.

python examples/quickstart.py
"""

import fedproto

rounds = 10
for algorithm in ("local", "fedproto"):
    result = fedproto.run(algorithm=algorithm, dataset="mnist5k", model="cnn-mh", rounds=rounds)
    accuracy = result.accuracy["head"]["mean"]
    print(f"{algorithm:9} {accuracy:.1%} accurate, mean over {len(result.clients)} clients")

first = result.clients[0]
sent = first["communication"]["bytes_up"] / rounds
print(f"client 0 knows {' '.join(first['classes'])}; it uploaded {sent:.0f} bytes per round")
