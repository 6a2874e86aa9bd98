-- What the sampler of a sweep noted when it was asked for a trial, as JSON: CMA-ES and QMC find it again there.
ALTER TABLE sweep_trials ADD COLUMN memory TEXT NOT NULL DEFAULT '';
