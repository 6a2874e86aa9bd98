"""The node program: what UGRO runs on a node. Python 3.9 and its standard library, nothing else of UGRO."""
