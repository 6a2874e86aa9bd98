"""Where to cut a model that is spread over unequal devices as a pipeline of stages."""
