"""The protocols that harnesses speak, one file each: a wire request becomes a Turn, a Reply becomes the wire answer.

`turn.py` has what all protocols share, `body.py` what they check alike. `routes.py` names them; `exchange.py` calls
them.
"""
