"""What UGRO's recipes share: flags, local files, hub ids, LoRA, evaluation, and the folder with the trained model.

A recipe (``ugro/recipes/``) is an ordinary script on top of this and of ``ugro.train``.
"""
