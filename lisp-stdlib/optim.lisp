;;; Optimizers: (param grad settings) -> (list new-param new-state …). Settings are numbers or scalar tensors.

(defoptimizer sgd (param grad &key (lr 1e-2) (momentum 0) (weight-decay 0))
  :state ((velocity zeros))
  "Gradient descent with heavy-ball momentum (Sutskever et al. 2013) and L2 weight decay added to the gradient."
  (let* ((g (if (= weight-decay 0) grad (+ grad (* weight-decay param))))
         (v (if (= momentum 0) g (+ (* momentum velocity) g))))
    (list (- param (* lr v)) v)))

(defoptimizer adamw (param grad &key (lr 1e-3) (betas [0.9 0.999]) (eps 1e-8) (weight-decay 1e-2))
  :state ((m zeros) (v zeros))
  "Adam with decoupled weight decay (Loshchilov and Hutter 2019), bias-corrected as in its algorithm 2."
  (destructuring-bind (b1 b2) betas
    (let* ((t (cast (+ (step) 1) f32))
           (m (+ (* b1 m) (* (- 1 b1) grad)))
           (v (+ (* b2 v) (* (- 1 b2) (* grad grad))))
           (correction1 (- 1 (power b1 t)))
           (correction2 (- 1 (power b2 t)))
           (denominator (+ (/ (sqrt v) (sqrt correction2)) eps)))
      (list (- (* param (- 1 (* lr weight-decay)))
               (* (/ lr correction1) (/ m denominator)))
            m v))))
