;;; Losses: scalars over the samples of a batch, or (list sum count) where the count depends on the data.

(defun cross-entropy (logits labels &key (ignore nil) (smoothing 0))
  "Mean of -log softmax(logits)[label] over all rows. logits [… classes], labels i32 [… ].
:smoothing s mixes the label with a uniform distribution of weight s (Szegedy et al. 2016). Rows whose label is :ignore
do not count, and the loss is then (list sum count), exact whatever the parts of a batch."
  (let* ((kept (if (numberp ignore) (/= labels ignore) nil))
         (safe (if (tensorp kept) (where kept labels 0) labels))
         (hard (softmax-cross-entropy logits safe))
         (rows (if (= smoothing 0)
                   hard
                   (+ (* (- 1 smoothing) hard) (* smoothing (- (logsumexp logits) (mean logits :axis -1)))))))
    (if (tensorp kept)
        (list (sum (where kept rows 0)) (sum (cast kept f32)))
        (mean rows))))

(defun accuracy (logits labels)
  "The share of rows whose largest logit is the label's. logits [… classes], labels i32 [… ]."
  (mean (cast (= (argmax logits :axis -1) labels) f32)))

(defun mean-squared-error (prediction target)
  "Mean of the squared difference; shapes must be equal or broadcast."
  (let ((d (- prediction target)))
    (mean (* d d))))

(defun mse (prediction target)
  "`mean-squared-error` by its short name."
  (mean-squared-error prediction target))

(defun mean-absolute-error (prediction target)
  "Mean of the absolute difference; shapes must be equal or broadcast."
  (mean (abs (- prediction target))))

(defun huber (prediction target &key (delta 1))
  "Mean of d²/2 where |d| < delta, else delta (|d| - delta/2) (Huber 1964); shapes equal or broadcast."
  (let ((d (abs (- prediction target))))
    (mean (where (< d delta) (* 1/2 d d) (* delta (- d (* 1/2 delta)))))))

(defun smooth-l1 (prediction target &key (beta 1))
  "Mean of d²/(2 beta) where |d| < beta, else |d| - beta/2: `huber` over beta (Girshick 2015); shapes equal or broadcast."
  (/ (huber prediction target :delta beta) beta))

(defun bce (logits targets &key (positive-weight 1))
  "Binary cross-entropy of sigmoid(logits), without overflow. targets f32 in [0, 1], of the logits' shape;
:positive-weight multiplies the terms of the positive class. Mean over all elements."
  (if (equal positive-weight 1)
      (mean (- (softplus logits) (* logits targets)))
      (mean (+ (* (- 1 targets) logits)
               (* (+ 1 (* (- positive-weight 1) targets)) (softplus (- logits)))))))

(defun kl-gaussian (mu log-variance)
  "KL(N(mu, exp(log-variance)) || N(0, 1)): the sum over the last axis, the mean over the rows. Both [… d]
(Kingma and Welling 2014, appendix B)."
  (mean (sum (* 1/2 (- (+ (exp log-variance) (* mu mu)) 1 log-variance)) :axis -1)))
