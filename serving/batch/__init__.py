"""Answers any number of images into one file: `openworld predict BUNDLE FOLDER_OR_PARQUET --out FILE`.

The images are cut into chunks once, at the beginning. Every chunk is answered by one process and its answers are stored
in a file of their own, so a killed run loses only the chunks that were in work. At the end the chunks are joined in
order. A folder beside the output file holds the plan, the list of images and the chunks until then.

Needs pyarrow, the extra `batch`.
"""
