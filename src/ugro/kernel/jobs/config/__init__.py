"""The keys of a job file, which are the options of ``ugro run``, too."""
