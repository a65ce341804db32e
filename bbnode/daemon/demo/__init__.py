"""`bbnode demo`: a server and its clients as processes, watched and reported."""
