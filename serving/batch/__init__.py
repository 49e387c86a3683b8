"""Answers any number of images into one file: `openworld predict BUNDLE FOLDER_OR_PARQUET --out FILE`.

The images are divided into chunks once, at the beginning. Every chunk is answered by one process and stored in a
separate file, so a killed run loses only unfinished chunks. At the end the chunks are joined in order. Until then, a
folder next to the output file holds the plan, the list of images and the chunks.

Needs pyarrow, the extra `batch`.
"""
