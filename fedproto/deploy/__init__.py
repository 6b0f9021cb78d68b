"""A federation across real machines, with Flower as its transport.

`server_app.py` and `client_app.py` are the apps that Flower starts. `member.py` says what a member
does with a request, `server_state.py` what the server keeps, `validation.py` and `outliers.py` what
it believes, and `round_protocol.py` runs the rounds. None of these knows Flower, and all arithmetic
in them is the simulator's.
"""
