"""A federation across real machines, with Flower as its transport.

`server.py` and `client.py` are the apps that Flower starts. What a member does with a message is in `member.py`, what
the server keeps and makes of the answers in `hall.py`, whom and what it believes in `rules.py`, the rounds in
`rounds.py`: none of these knows Flower, and all maths in them is the simulator's.
"""
