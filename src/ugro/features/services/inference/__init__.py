"""The default inference server: ``python -m ugro.features.services.inference --model FOLDER``.

It runs in a replica's process, on any node: UGRO sends its own package as a zip, so nothing here reads a file of the
package. It serves what ``ugro.train`` and the recipes made, and any model that transformers loads, on CPU or GPU.
"""
